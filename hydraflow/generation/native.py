"""The generation engine that runs in this process: any Hugging Face causal language model, on CPU and GPU.

In: prompts, sampling settings, and a stream of weights. Out: responses with the log-probability of every
token. Left out on purpose: paged caches, continuous batching and several devices per model, which serving
engines have. This one is exact (its numbers are those of the trainer's forward pass), and for a given seed
its samples do not depend on the rest of the batch, except for rounding where `decode.py` says so.

Legend: B rows, R response, N tokens of all rows together.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, TokenizersBackend

from hydraflow.device import return_memory
from hydraflow.generation.base import (
    ASLEEP,
    LENGTH,
    MIXED_WEIGHTS,
    NO_WEIGHTS,
    STOP,
    Completion,
    EngineSpec,
    GenerationOutput,
    GenerationRequest,
    Key,
    SamplingParams,
    TokenRequest,
)
from hydraflow.generation.decode import WaveDecoder, WaveResult
from hydraflow.generation.forward import CachedForward, NoCache
from hydraflow.generation.layout import Wave, request_order, waves
from hydraflow.generation.parity import not_sampled, require_parity
from hydraflow.generation.reordered import let_linears_reorder
from hydraflow.generation.requests import Limits, aborted
from hydraflow.generation.sampling import UniformDraws
from hydraflow.generation.steady import steady_products
from hydraflow.generation.stopping import StopStrings, watched
from hydraflow.generation.weights import Arrivals, held_weights, load_weights
from hydraflow.models.loading import context_of, soft_capped, unfilled_model, widen_buffers
from hydraflow.models.routers import HFRouters
from hydraflow.protocol import ragged
from hydraflow.weights.buckets import Weight


class _Rows(NamedTuple):
    """Responses to one prompt."""

    prompt: Tensor
    key: Key
    samples: Sequence[int]
    """Sample number of each."""


class NativeEngine:
    """A `GenerationEngine` around a model that it owns."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_num_seqs: int = 1024,
        generation_config: GenerationConfig | None = None,
        tokenizer: TokenizersBackend | None = None,
    ):
        """Takes over a model with valid weights and disables its gradients.

        generation_config: the source of end tokens; by default the model's. tokenizer: for stop strings.
        """
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs={max_num_seqs} must be at least 1")
        self._model = model.eval().requires_grad_(False)
        steady_products(model)
        let_linears_reorder(model)
        self._forward = CachedForward(model)
        self._max_rows = max_num_seqs
        self._eos = end_tokens(generation_config or model.generation_config, model.config)
        embeddings: Any = model.get_input_embeddings()
        self._limits = Limits(context_of(model.config), embeddings.num_embeddings, tokenizer)
        self._not_ready = ""
        self._arrivals = Arrivals(model)
        self._unchecked: str | None = None
        """Configuration key of the engine until its log-probabilities have been checked; then None."""
        self._found_routers: HFRouters | None = None
        """The model's routers, once experts have been requested."""
        self._queue: dict[str, TokenRequest] = {}
        """Requests in flight, by name."""
        self._empty: dict[Tensor, torch.Size] = {}
        """While it sleeps: its weights and their shapes."""

    def generate(self, request: GenerationRequest, params: SamplingParams) -> GenerationOutput:
        if self._not_ready:
            raise RuntimeError(self._not_ready)
        self._limits.require(request.prompts, params)
        rows = [_Rows(*one) for one in zip(request.prompts, request.keys, map(range, request.samples))]
        return self._sample(rows, params)

    def submit(self, requests: Sequence[TokenRequest]) -> None:
        if self._not_ready:
            raise RuntimeError(self._not_ready)
        self._limits.require_all(requests)
        if any(one.params.routes for one in requests):
            self._routers()
        self._queue |= {one.name: one for one in requests}

    def advance(self) -> list[Completion]:
        """See `GenerationEngine`. Finishes the responses that have been in flight longest, and those that can
        be batched with them."""
        first = next(iter(self._queue.values()), None)
        if first is None:
            return []
        key = first.left, len(first.sampled)
        alike = [one for one in self._queue.values() if (one.left, len(one.sampled)) == key]
        groups: dict[tuple[int, Key, tuple[int, ...]], list[TokenRequest]] = {}
        for one in alike[: self._max_rows]:
            groups.setdefault((id(one.prompt), one.key, one.sampled), []).append(one)
        rows = [_Rows(some[0].context, some[0].key, [one.sample for one in some]) for some in groups.values()]
        output = self._sample(rows, first.left, sampled=len(first.sampled))
        names = [one.name for some in groups.values() for one in some]
        for name in names:
            del self._queue[name]
        routes = output.routed_experts
        of_rows = [None] * len(names) if routes is None else ragged.rows(routes)
        columns = ragged.rows(output.responses), ragged.rows(output.log_probs), output.finish_reason, of_rows
        return [Completion(*one) for one in zip(names, *columns, strict=True)]

    def abort(self, names: Collection[str]) -> list[Completion]:
        """See `GenerationEngine`. Between two calls, no request in flight has any token yet."""
        return [aborted(name) for name in names if self._queue.pop(name, None) is not None]

    def update_weights(self, stream: Iterable[Weight], *, first: bool = True, last: bool = True) -> None:
        """Loads weights, converting dtypes and devices.

        ValueError: see `load_weights`; the engine then refuses to generate until an update succeeds.
        ConfigError: see `require_parity`.
        """
        self._not_ready = MIXED_WEIGHTS
        if first:
            for tensor, shape in self._empty.items():
                tensor.data = tensor.new_empty(shape)
            self._empty = {}
            self._arrivals.forget()
        load_weights(self._arrivals, stream)
        if last:
            self._arrivals.require_all()
            self._not_ready = ""
            field, self._unchecked = self._unchecked, None
            if field is not None:
                require_parity(self, self._model, field)

    def sleep(self) -> None:
        """See `GenerationEngine`. It has caches only while it generates."""
        self._not_ready = ASLEEP
        self._forward.drop_weights()
        for tensor in set(self.held().values()) - set(self._empty):  # tied weights are one tensor
            self._empty[tensor] = tensor.shape
            tensor.data = tensor.new_empty(0)
        return_memory(self._forward.device.type)

    def held(self) -> Mapping[str, Tensor]:
        return held_weights(self._model)

    def _sample(self, rows: Sequence[_Rows], params: SamplingParams, sampled: int = 0) -> GenerationOutput:
        """Samples all rows, in this order. sampled: trailing prompt tokens that belong to the responses."""
        lengths, counts = [len(some.prompt) for some in rows], [len(some.samples) for some in rows]
        pad, mixed = self._forward.pads, self._forward.mixes
        plan = list(waves(lengths, counts, self._max_rows, pad=pad, mixed=mixed))
        return _output([self._run(wave, rows, params, sampled) for wave in plan], request_order(plan, counts))

    # tensors made here cannot be used in training, so the engine returns copies only
    @torch.inference_mode()
    def _run(self, wave: Wave, rows: Sequence[_Rows], params: SamplingParams, sampled: int) -> WaveResult:
        device, prompts = self._forward.device, [rows[i] for i in wave.prompts]
        draws = None
        if not params.greedy:
            samples = [prompts[at].samples[i] for at, i in zip(wave.owner, wave.samples, strict=True)]
            keys = [some.key for some in prompts]
            draws = UniformDraws(keys, np.array(samples), np.array(wave.owner), device, sampled=sampled)
        routers = self._routers() if params.routes else None
        decoder = WaveDecoder(self._forward, wave, [some.prompt for some in prompts], draws, routers)
        stop_tokens = torch.tensor(params.all_stop_tokens(self._eos), dtype=torch.int64, device=device)
        try:
            return decoder.run(params, stop_tokens, self._stop_strings(prompts, wave.owner, params, sampled))
        finally:
            self._forward.drop_copies()

    def _routers(self) -> HFRouters:
        """ValueError: the model has no experts, or unsupported routers."""
        self._found_routers = self._found_routers or HFRouters(self._model)
        if not self._found_routers.replays:
            raise ValueError(f"{type(self._model).__name__} has no experts that can be recorded")
        return self._found_routers

    def _stop_strings(
        self, prompts: Sequence[_Rows], owner: Sequence[int], params: SamplingParams, sampled: int
    ) -> list[StopStrings]:
        """Stop-string matcher of each row; empty if there are no stop strings."""
        if not params.stop:
            return []
        contexts = [some.prompt.tolist() for some in prompts]
        split = [(ids[: len(ids) - sampled], ids[len(ids) - sampled :]) for ids in contexts]
        return [watched(self._limits.tokenizer, params, *split[at]) for at in owner]


def build(config: PreTrainedConfig, spec: EngineSpec) -> NativeEngine:
    """The engine of a rollout process, without weights: call `update_weights` before `generate`. Reads no
    files and draws no random numbers. ConfigError for a model that it cannot sample from."""
    config = copy.deepcopy(config)
    # the trainer may have set its own attention, which supports packed rows but no cache
    config._attn_implementation = "eager" if soft_capped(config) else None
    model = unfilled_model(config, device=spec.device, dtype=spec.dtype, trust=spec.trust_remote_code)
    widen_buffers(model)
    field = f"{spec.section}.name"
    try:
        engine = NativeEngine(
            model,
            max_num_seqs=spec.rollout.max_num_seqs,
            generation_config=spec.generation_config,
            tokenizer=spec.tokenizer,
        )
    except NoCache as error:
        raise not_sampled(config.model_type, field, str(error)) from error
    engine._not_ready, engine._unchecked = NO_WEIGHTS, field
    return engine


def end_tokens(generation_config: GenerationConfig | None, config: PreTrainedConfig) -> tuple[int, ...]:
    """The model's end tokens: those of its generation settings, else of its configuration, else none."""
    for source in (generation_config, config.get_text_config()):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


def _output(results: Sequence[WaveResult], order: np.ndarray) -> GenerationOutput:
    """Rows of all waves in the request's order, on the host."""
    lengths = torch.cat([r.lengths.cpu() for r in results])
    stopped = torch.cat([r.stopped.cpu() for r in results]).numpy()
    reason = np.where(stopped, STOP, LENGTH).astype(object)
    columns = []
    for tensors in ([r.tokens for r in results], [r.log_probs for r in results]):
        used = [
            t.cpu()[torch.arange(t.shape[1]) < r.lengths.cpu()[:, None]] for t, r in zip(tensors, results)
        ]  # (N,) each
        columns.append(ragged.take(ragged.from_parts(torch.cat(used).clone(), lengths.clone()), order))
    of_rows = [row for result in results for row in result.routes or ()]
    routes = ragged.take(ragged.from_rows(of_rows), order) if of_rows else None
    return GenerationOutput(columns[0], columns[1], reason[order], routes)
