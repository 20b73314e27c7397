"""Mixtures of experts in vLLM: unpacked expert weights, and the experts of each token.

In: vLLM's models. Out: on a CPU a kernel that computes with the weights as loaded, and for each request the
experts of its tokens. Left out on purpose: kernels that repack weights (FlashInfer's, AITER's), because
reloaded weights would read back right but compute wrong (`whole_experts` refuses them); models with several
kinds of cache.

Legend: N tokens of a forward pass, L layers with experts, K experts of a token, E experts, H hidden size,
I size of an expert.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hydraflow.models.routing import stored_as

WEIGHTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight", "w13": "w13_weight", "w2": "w2_weight"}
"""Checkpoint names of a layer's expert tensors, (E, 2I, H) and (E, H, I) -> vLLM's parameter names."""
RENAMED = {
    "MixtralForCausalLM": {
        ".mlp.experts.gate_up_proj": ".block_sparse_moe.experts.w13",
        ".mlp.experts.down_proj": ".block_sparse_moe.experts.w2",
        ".mlp.gate.": ".block_sparse_moe.gate.",
    }
}
"""vLLM class -> parts of transformers' weight names and their replacements for its loader."""
PLAIN_BACKENDS = ("TRITON", "BATCHED_TRITON", "CPU")
"""vLLM's kernels that do not repack weights; on a CPU after `keep_experts_plain`."""
ROUTES = "hydraflow_routes"
"""Attribute of a model runner for its `SlotRoutes`."""


def keep_experts_plain() -> None:
    """On a CPU: makes vLLM compute experts with torch. Its own kernels repack the weights, and need sizes
    that are multiples of 32."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    kernel: Any = CPUUnquantizedExperts
    kernel.process_weights_after_loading = lambda self, layer: None
    kernel._supports_grouped_gemm = classmethod(lambda cls, moe_config: (True, None))
    kernel._supports_activation = staticmethod(lambda activation: activation == MoEActivation.SILU)
    kernel.apply = _apply


def _apply(
    self: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    apply_router_weight_on_input: bool,
    **unused: Any,
) -> None:
    """output (N, H): the sum over a token's local experts. expert_map: local index of each expert, or -1."""
    if apply_router_weight_on_input:  # vLLM has already multiplied the input
        topk_weights = torch.ones_like(topk_weights)
    total = torch.zeros_like(output)
    for expert in topk_ids.unique().tolist():
        here = expert if expert_map is None else int(expert_map[expert])
        if here < 0:
            continue
        token, choice = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(hidden_states[token], w1[here]).chunk(2, -1)
        found = F.linear(F.silu(gate) * up, w2[here])
        total.index_add_(0, token, found * topk_weights[token, choice, None].to(found))
    output.copy_(total)


def vllm_name(model: nn.Module, name: str) -> str:
    """The name of a weight for vLLM's loader."""
    for ours, theirs in RENAMED.get(type(model).__name__, {}).items():
        name = name.replace(ours, theirs)
    return name


def name_of_experts(name: str) -> str:
    """vLLM's name of a weight that holds all experts of a layer; other names stay as they are.

    >>> name_of_experts("model.layers.0.mlp.experts.down_proj")
    'model.layers.0.mlp.experts.routed_experts.w2_weight'
    >>> name_of_experts("model.layers.0.mlp.down_proj")
    'model.layers.0.mlp.down_proj'
    """
    module, _, kind = name.rpartition(".")
    is_all = kind in WEIGHTS and module.endswith("experts")
    return f"{module}.routed_experts.{WEIGHTS[kind]}" if is_all else name


def is_experts(module: nn.Module) -> bool:
    """Whether the module holds a layer's expert weights."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return isinstance(module, RoutedExperts)


def whole_experts(module: Any, kind: str, part: Tensor) -> Tensor:
    """A parameter of all experts, as a single device would hold it. Collective if they are sharded.
    ValueError when the kernel repacks them.

    kind: its name in the module.
    """
    from vllm.distributed import get_tp_group

    backend = getattr(getattr(module.quant_method, "unquantized_backend", None), "name", "a quantized kernel")
    if backend not in PLAIN_BACKENDS:
        raise ValueError(
            f"the kernel of its experts, {backend}, repacks them; engine_kwargs.vllm.moe_backend sets another"
        )
    layout = module.moe_config.moe_parallel_config
    if layout.use_ep and layout.ep_size > 1:
        if (experts := module.moe_config.num_experts) % layout.ep_size:
            raise ValueError(f"{experts} experts do not divide among {layout.ep_size} ranks")
        return get_tp_group().all_gather(part.contiguous(), dim=0)
    if layout.tp_size == 1:
        return part
    if kind.startswith("w2"):
        return get_tp_group().all_gather(part.contiguous(), dim=2)
    ranks = get_tp_group().all_gather(part.contiguous(), dim=1).chunk(layout.tp_size, 1)
    gates, ups = zip(*(rank.chunk(2, 1) for rank in ranks), strict=True)
    return torch.cat([*gates, *ups], 1)


class SlotRoutes:
    """The experts of every token in the KV cache, stored by cache slot, so that tokens of a cached prompt or
    an interrupted request are found as well. A pipeline stage stores those of its layers."""

    def __init__(self, model: nn.Module, cache: Any):
        """model: vLLM's. cache: the configuration of its cache. ValueError: a model whose routers do not say
        what they choose, or whose layers have several kinds of cache."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

        found = sorted(
            (module for module in model.modules() if isinstance(module, MoERunner)),
            key=lambda module: module.layer_id,
        )
        name = type(model).__name__
        routers = [module.router for module in found if isinstance(module.router, BaseRouter)]
        if not routers or len(routers) < len(found):
            raise ValueError(f"{name} has no experts that can be recorded")
        if len(cache.kv_cache_groups) != 1:
            raise ValueError(f"the layers of {name} have {len(cache.kv_cache_groups)} kinds of cache")
        self._block = cache.kv_cache_groups[0].kv_cache_spec.block_size
        slots = cache.num_blocks * self._block
        first = routers[0]
        self._experts = torch.zeros(
            (slots + 1, len(routers), first.top_k),  # the last one is for padding tokens
            dtype=stored_as(first.global_num_experts),
            device=next(model.parameters()).device,
        )
        for layer, router in enumerate(routers):
            router.set_capture_fn(partial(self._note, layer))

    def of_tokens(self, blocks: list[int], tokens: int) -> Tensor:
        """(tokens, L, K) on the host: the experts of the first tokens whose cache is in these blocks, in all
        layers. Collective."""
        from vllm.distributed import get_pp_group

        slots = torch.tensor(blocks)[:, None] * self._block + torch.arange(self._block)
        mine, stages = self._experts[slots.flatten()[:tokens].to(self._experts.device)].cpu(), get_pp_group()
        return torch.cat([stages.broadcast_object(mine, src=stage) for stage in range(stages.world_size)], 1)

    def _note(self, layer: int, experts: Tensor) -> None:
        """experts: (N, K) of a forward pass, padding tokens included; may be captured in a CUDA graph."""
        from vllm.forward_context import get_forward_context

        mapping = get_forward_context().slot_mapping
        assert isinstance(mapping, dict), "micro-batching is off"
        if not mapping:  # a profiling pass
            return
        slots = next(iter(mapping.values()))[: len(experts)]
        self._experts[slots % len(self._experts), layer] = experts[: len(slots)].to(self._experts.dtype)


def record_routes() -> None:
    """Adds `SlotRoutes` to the models that this process builds from now on. They must exist before CUDA
    graphs are captured, so the hook is vLLM's cache initialisation."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner: Any = GPUModelRunner
    initialize = runner.initialize_kv_cache

    def initialize_kv_cache(self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, kv_cache_config, *args, **kwargs)
        setattr(self, ROUTES, SlotRoutes(self.get_model(), kv_cache_config))

    runner.initialize_kv_cache = initialize_kv_cache
