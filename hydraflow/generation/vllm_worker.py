"""Extensions that run inside vLLM's worker: loading, reading back and dropping weights, and the
log-probabilities that training needs.

In: calls from `vllm.py`, by name. vLLM mixes `WeightReceiver` into its worker class (`worker_extension_cls`),
so `self` is that worker. A model on several devices has a process on each, with its own engine
(`vllm_executor.py`). Left out on purpose: weights that vLLM transforms (quantised, or experts that its
kernels repack). vLLM is imported lazily: this module is also imported where vLLM is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hydraflow.device import return_memory
from hydraflow.generation.vllm_adapters import replace_adapter
from hydraflow.generation.vllm_experts import ROUTES, is_experts, vllm_name, whole_experts
from hydraflow.generation.vllm_weights import HeldWeights, HFWeight


def tempered_sampler(logprobs_mode: str) -> Any:
    """A sampler of vLLM's whose log-probabilities are those of softmax(logits / temperature) before top-k and
    top-p, as in training.

    vLLM's own modes ignore the temperature (`raw_logprobs`) or renormalise over what the filters keep
    (`processed_logprobs`). Here vLLM takes `raw_logprobs` of logits that were already divided. The division
    is in place, because a copy made decoding 5 % slower; so logits processors see divided logits. Greedy rows
    have temperature 1.
    """
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.sample.sampler import Sampler

    class TemperedSampler(Sampler):
        def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            if (temperature := sampling_metadata.temperature) is not None:  # None: all rows are greedy
                logits = Sampler.apply_temperature(logits.float(), temperature, all_random=False)
            return super().forward(logits, sampling_metadata, *args, **kwargs)

        @staticmethod
        def apply_temperature(logits: Tensor, temp: Tensor, all_random: bool) -> Tensor:
            return logits  # `forward` has divided them

        @staticmethod
        def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
            """Log-probabilities of the sampled tokens only. vLLM would also compute each one's rank."""
            assert num_logprobs == 0, "only the sampled tokens' are requested"
            ids, no_ranks = token_ids[:, None], torch.zeros_like(token_ids, dtype=torch.int32)
            return LogprobsTensors(ids.to(torch.int32), logprobs.gather(-1, ids), no_ranks)

    return TemperedSampler(logprobs_mode)


def whole(module: nn.Module, kind: str, part: Tensor) -> Tensor:
    """A parameter or buffer, as a single device would hold it. Collective if the module is sharded.

    kind: its name in the module.
    """
    from vllm.distributed import get_tp_group
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if is_experts(module):
        return whole_experts(module, kind, part)
    if getattr(module, "tp_size", 1) == 1:
        return part
    if isinstance(module, RowParallelLinear):
        return get_tp_group().all_gather(part.contiguous(), dim=1) if kind == "weight" else part
    if not isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
        return part
    ranks = get_tp_group().all_gather(part.contiguous(), dim=0).chunk(module.tp_size)
    if isinstance(module, VocabParallelEmbedding):
        return torch.cat(ranks)
    of_ranks = zip(*(rank.split(module.output_partition_sizes) for rank in ranks), strict=True)
    copies = getattr(module, "num_kv_head_replicas", 1)  # ranks that hold the same keys and values
    first, *others = of_ranks  # with replicated key-value heads the first part is the queries
    return torch.cat([_joined(first, 1), *(_joined(pieces, copies) for pieces in others)])


def _joined(pieces: Sequence[Tensor], copies: int) -> Tensor:
    """Joins the pieces of all ranks; `copies` neighbours must hold the same. ValueError when they differ."""
    for first in range(0, len(pieces), copies):
        if any(not torch.equal(pieces[first], piece) for piece in pieces[first + 1 : first + copies]):
            raise ValueError(f"ranks {first} to {first + copies - 1} hold different keys and values")
    return torch.cat(tuple(pieces[::copies]))


class WeightReceiver:
    """The methods that are added to vLLM's worker."""

    model_runner: Any
    vllm_config: Any
    sleep: Callable[..., None]
    wake_up: Callable[[list[str]], None]
    """Methods of vLLM's worker; no-ops on a CPU."""
    _asleep: bool
    """On a GPU: whether vLLM's allocator has released its memory."""
    _empty: dict[Tensor, torch.Size]
    """On a CPU, while it rests: its weights and their shapes."""
    _cache_bytes: dict[Tensor, int]
    """On a CPU, while it rests: its caches and their sizes in bytes."""

    def hydraflow_prepare(self) -> None:
        """Replaces vLLM's sampler with ours, and allocates the input of a pipeline stage, which vLLM does in
        a profiling pass that it skips on a CPU."""
        from vllm.distributed import get_pp_group

        runner = self.model_runner
        runner.sampler = tempered_sampler(runner.model_config.logprobs_mode)
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        self._empty, self._cache_bytes, self._asleep, self._packed = {}, {}, False, False

    def hydraflow_load_weights(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Loads some of the weights, by Hugging Face names, with the loader of vLLM's model class."""
        from vllm.config import set_current_vllm_config

        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            model = self.model_runner.get_model()
            model.load_weights((vllm_name(model, name), tensor) for name, tensor in stream)

    def hydraflow_pack_weights(self, changed: bool) -> None:
        """On a CPU: packs all linear weights for its matrix products, also a tied head's, if they have
        `changed` or are not packed."""
        from vllm.model_executor.layers import utils

        if changed or not self._packed:
            for layer in self._packed_layers():
                utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        self._packed = True

    def hydraflow_load_adapter(self, number: int, rank: int, tensors: Mapping[str, Tensor]) -> None:
        """See `replace_adapter`."""
        replace_adapter(self.model_runner.lora_manager, number, rank, tensors)

    def hydraflow_read_weights(self, wanted: Mapping[str, HFWeight]) -> HeldWeights:
        """The weights by Hugging Face name."""
        from vllm.distributed import get_pp_group

        return HeldWeights(self.model_runner.get_model(), wanted, whole, get_pp_group())

    def hydraflow_read_routes(self, request: str, tokens: int) -> Tensor | None:
        """uint8 or int16 (tokens, L, K): the experts of a request's first tokens; valid until the next
        forward pass. None: the request never started."""
        state = self.model_runner.requests.get(request)
        if state is None:
            return None
        return getattr(self.model_runner, ROUTES).of_tokens(state.block_ids[0], tokens)

    def hydraflow_clear_cache(self) -> None:
        """Sets all keys and values to zero."""
        if self._asleep:
            self.wake_up(["kv_cache"])
            self._asleep = False
        for cache in self.model_runner.kv_caches:
            cache.zero_()

    def hydraflow_rest(self, keeps: bool) -> None:
        """Releases the memory of weights and cache; `keeps`: weights are kept in host memory."""
        if self.model_runner.device.type != "cpu":
            # memory comes back at the same addresses, which CUDA graphs rely on
            self.sleep(level=1 if keeps else 2)
            self._asleep = True
            return
        for layer in self._packed_layers():
            layer.cpu_linear = F.linear  # drops the packed copy of its weight
        self._packed = False
        for weight in set() if keeps else set(self.model_runner.get_model().parameters()) - set(self._empty):
            self._empty[weight] = weight.shape
            weight.data = weight.new_empty(0)
        for cache in self.model_runner.kv_caches:
            # layers hold views, so the storage itself must be freed; all layers may share one
            if nbytes := cache.untyped_storage().nbytes():
                self._cache_bytes[cache] = nbytes
                cache.untyped_storage().resize_(0)
        return_memory("cpu")

    def hydraflow_wake_weights(self) -> None:
        """Reallocates the memory, uninitialised except for kept weights; on a GPU the cache follows once all
        weights have arrived."""
        if self._asleep:
            self.wake_up(["weights"])
        for weight, shape in self._empty.items():
            weight.data = weight.new_empty(shape)
        for cache, nbytes in self._cache_bytes.items():
            cache.untyped_storage().resize_(nbytes)
        self._empty, self._cache_bytes = {}, {}

    def _packed_layers(self) -> list[Any]:
        """The layers that multiply with a packed copy of their weight: none on a GPU, or where the model is
        compiled."""
        if self.model_runner.device.type != "cpu" or not self.vllm_config.model_config.enforce_eager:
            return []
        layers = [one for one in self.model_runner.get_model().modules() if hasattr(one, "cpu_linear")]
        return [
            layer
            for layer in layers
            if layer.weight.ndim == 2 and not getattr(layer, "_cpu_skip_gemm_dispatch", False)
        ]
