"""Mixture-of-experts layers: Megatron-Core's exchange of tokens between ranks, and the experts themselves.

In: hidden states. Out: for each token the weighted sum of the outputs of the experts that its router chose.
Routers compute in float32 by default, and sums over experts are taken in float32, so that a token's experts
do not change from one pass to the next. Each rank holds some experts, with all matrices of a kind in one
tensor, as in transformers; shared experts are Megatron-Core's. Left out on purpose: auxiliary losses over all
tokens of a micro-batch (their gradient depends on how rows are split), and Transformer Engine's grouped
matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from hydraflow.engine import process_group
from hydraflow.engine.megatron.balance import AddLoss, balance_loss, updated_biases
from hydraflow.engine.megatron.matrices import matrices
from hydraflow.engine.megatron.packed_line import PackedLine
from hydraflow.models.routing import RouterReplay

ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
"""Dtypes of routers, by Megatron-Core's names."""


class CoreReplay(RouterReplay):
    """Megatron-Core's hook around a router's top-k (`router_replay`). Its own `RouterReplay` relies on the
    order of calls. Here each layer says which line it computes, so that recomputed activations use the same
    experts even if the pipeline ran other lines in between."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and indices of the selected experts, (N, K) each, from the scores (N, E) of all."""
        assert default_compute_topk is not None, "Megatron-Core passes its own choice"
        found = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        return self.choose(scores, *found)


class Router(TopKRouter):
    """Selects experts, and counts the tokens sent to each inside `counting`."""

    is_counting = False
    line: PackedLine | None = None
    """The line being computed."""

    def __init__(self, config: TransformerConfig, pg_collection: Any = None):
        super().__init__(config=config, pg_collection=pg_collection)
        self.counts: torch.Tensor
        self.balance: torch.Tensor
        self.counts_of_step: torch.Tensor
        for name in ("counts", "counts_of_step"):
            self.register_buffer(name, torch.zeros(self.num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("balance", torch.zeros(()), persistent=False)
        self.router_replay = CoreReplay()

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """(..., E) logits. Megatron-Core's own calls Transformer Engine."""
        dtype = ROUTER_DTYPES[self.config.moe_router_dtype]
        return F.linear(input.to(dtype), self.weight.to(dtype))

    def routing(self, logits: torch.Tensor, *args: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, E) weights and choices."""
        weights, chosen = super().routing(logits, *args, **more)
        logits = logits.view(weights.shape)
        if self.score_function == "sigmoid" and self.config.moe_router_pre_softmax:
            # Megatron-Core would normalise them so that they add up to the scaling factor
            weights = torch.sigmoid(logits) * self.config.moe_router_topk_scaling_factor * chosen
        if self.line is not None and self.line.balanced is not None:
            loss = balance_loss(self._shares(logits), self.topk, self.line.balanced)
            weights = AddLoss.apply(weights, loss)
            self.balance += loss.detach() * self.is_counting
        if self.is_counting:
            assert self.line is not None and self.line.rows_with is not None, "counted lines have rows"
            self.counts += (chosen * self.line.rows_with[:, None]).sum(0)
        return weights, chosen

    def _shares(self, logits: torch.Tensor) -> torch.Tensor:
        """(N, E) scores that add up to 1 for each token."""
        if self.score_function == "softmax":
            return logits.softmax(-1)
        scores = torch.sigmoid(logits)
        return scores / scores.sum(-1, keepdim=True)


class Experts(MegatronModule):
    """This rank's experts, or with expert-tensor parallelism its rows and columns of them."""

    def __init__(self, count: int, config: TransformerConfig, *, pg_collection: Any):
        super().__init__(config=config)
        width, hidden = config.moe_ffn_hidden_size // pg_collection.expt_tp.size(), config.hidden_size
        self.gate_up = nn.Parameter(torch.empty(count, 2 * width, hidden, dtype=config.params_dtype))
        self.down = nn.Parameter(torch.empty(count, hidden, width, dtype=config.params_dtype))
        for parameter in self.parameters():
            marked: Any = parameter
            # Megatron-Core's mark of expert parameters, which not all data ranks share
            marked.allreduce = False

    def forward(
        self, tokens: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """(N, hidden) outputs. tokens: (N, hidden), sorted by expert; counts: tokens of each expert; weights:
        (N,)."""
        sizes, found = counts.tolist(), []
        parts = zip(tokens.split(sizes), weights.split(sizes), self.gate_up.unbind(), self.down.unbind())
        for rows, weight, gate_up, down in parts:
            gate, up = F.linear(rows, gate_up).chunk(2, -1)
            output = F.linear(F.silu(gate) * up, down)
            found.append((output * weight[:, None]).to(tokens.dtype))
        return torch.cat(found), None


class ExpertLayer(MoELayer):
    """Replaces the MLP of a layer with experts."""

    def __init__(self, config: TransformerConfig, **others: Any):
        kinds = matrices(config)
        both = MLPSubmodules(linear_fc1=kinds.column, linear_fc2=kinds.row)
        shared = ModuleSpec(SharedExpertMLP, submodules=both)
        super().__init__(
            config, MoESubmodules(experts=Experts, shared_experts=shared, router=Router), **others
        )

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        """Restores the order of the tokens; sums their experts' outputs in at least float32."""
        wide = output.to(torch.promote_types(output.dtype, torch.float32))
        return super().postprocess(wide, shared_expert_output).to(output.dtype)


class RoutedLayer(TransformerLayer):
    """A layer with experts; tells its router which line it computes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron-Core calls it, with `packed_seq_params` a `PackedLine`."""
        router, line = self.mlp.router, kwargs["packed_seq_params"]
        router.line, replay = line, router.router_replay
        replay.line, replay.layer = line.routes, self.layer_number
        return super().forward(*args, **kwargs)


@contextmanager
def counting(model: nn.Module) -> Iterator[None]:
    """Counts the tokens of forward passes in the block. Backward passes must be outside it: they may
    recompute activations, which would be counted again."""
    routers = _routers([model])
    for router in routers:
        router.is_counting = True
    try:
        yield
    finally:
        for router in routers:
            router.is_counting = False


@dataclass(frozen=True)
class Load:
    """Distribution of all rows' tokens over the experts of all layers."""

    busiest: float
    """The largest share of a layer's choices that went to one expert; 1 / E with even routing."""
    idle: float
    """The share of experts that no token chose."""
    balance: float
    """The sum of the balancing losses of all layers."""


def take_load(chunks: Sequence[nn.Module]) -> Load:
    """The load since the last call. Collective."""
    routers = _routers(chunks)
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    share, sums = torch.zeros(()), torch.zeros(3, dtype=torch.float64)
    if routers:
        counts = torch.stack([router.counts for router in routers])
        total = process_group.all_reduce(counts, "sum", group)
        balance = torch.stack([router.balance for router in routers])
        balance = process_group.all_reduce(balance, "sum", group).sum()
        for router, of_layer in zip(routers, total, strict=True):
            router.counts_of_step += of_layer.to(router.counts_of_step)
        reset_counts(chunks)
        share = (total.amax(-1) / total.sum(-1).clamp(min=1)).amax()
        sums = torch.tensor([float((total == 0).sum()), total.numel(), float(balance)])
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    idle, all_experts, balance_of_all = process_group.all_reduce(sums, "sum", pipeline).tolist()
    busiest = float(process_group.all_reduce(share, "max", pipeline))
    return Load(busiest, idle / all_experts, balance_of_all)


def reset_counts(chunks: Iterable[nn.Module]) -> None:
    for router in _routers(chunks):
        router.counts.zero_()
        router.balance.zero_()


def update_biases(chunks: Iterable[nn.Module], rate: float) -> None:
    """Moves router biases towards an even load, by the token counts that `take_load` has added up since the
    last call, and resets the counts; a rate of 0 moves nothing."""
    for router in _routers(chunks):
        if rate > 0 and router.expert_bias is not None:
            router.expert_bias.copy_(updated_biases(router.expert_bias, router.counts_of_step, rate))
        router.counts_of_step.zero_()


def _routers(chunks: Iterable[nn.Module]) -> list[Router]:
    return [one for chunk in chunks for one in chunk.modules() if isinstance(one, Router)]
