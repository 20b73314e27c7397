"""Layers of experts: Megatron-Core's exchange of tokens between ranks, and the experts themselves.

In: hidden states. Out: for each token the weighted sum of the experts that its router chose. Routers compute
in float32 unless told otherwise, and sums over experts are taken in float32, so that a token's experts do not
change from one pass to the next. Each rank holds some experts, all matrices of a kind in one tensor, as
transformers does. Left out on purpose: shared experts, auxiliary losses (their gradient depends on how rows
are cut into micro-batches), and Transformer Engine's grouped matrices.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from hydraflow.engine import process_group

ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
"""Types that routers compute in, by Megatron-Core's names."""


class Router(TopKRouter):
    """Chooses experts, and counts the tokens that it sends to each in training."""

    def __init__(self, config: TransformerConfig, pg_collection: Any = None):
        super().__init__(config=config, pg_collection=pg_collection)
        self.counts: torch.Tensor
        self.register_buffer("counts", torch.zeros(self.num_experts, dtype=torch.int64), persistent=False)

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """(..., E) logits. Megatron-Core's own calls Transformer Engine."""
        dtype = ROUTER_DTYPES[self.config.moe_router_dtype]
        return F.linear(input.to(dtype), self.weight.to(dtype))

    def routing(self, logits: torch.Tensor, *args: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, E) weights and choices."""
        weights, chosen = super().routing(logits, *args, **more)
        if torch.is_grad_enabled():  # once for each token, also where activations are computed again
            self.counts += chosen.sum(0)
        return weights, chosen


class Experts(MegatronModule):
    """The experts of one rank, or with expert-tensor parallelism its rows and columns of them."""

    def __init__(self, count: int, config: TransformerConfig, *, pg_collection: Any):
        super().__init__(config=config)
        width, hidden = config.moe_ffn_hidden_size // pg_collection.expt_tp.size(), config.hidden_size
        self.gate_up = nn.Parameter(torch.empty(count, 2 * width, hidden, dtype=config.params_dtype))
        self.down = nn.Parameter(torch.empty(count, hidden, width, dtype=config.params_dtype))
        for parameter in self.parameters():
            marked: Any = parameter
            marked.allreduce = False  # how Megatron-Core tells experts from what all data ranks share

    def forward(
        self, tokens: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """tokens (N, hidden), expert by expert, `counts` of them each, and their weights (N,), to
        (N, hidden)."""
        sizes, found = counts.tolist(), []
        parts = zip(tokens.split(sizes), weights.split(sizes), self.gate_up.unbind(), self.down.unbind())
        for rows, weight, gate_up, down in parts:
            gate, up = F.linear(rows, gate_up).chunk(2, -1)
            output = F.linear(F.silu(gate) * up, down)
            found.append((output * weight[:, None]).to(tokens.dtype))
        return torch.cat(found), None


class ExpertLayer(MoELayer):
    """What takes the place of an MLP."""

    def __init__(self, config: TransformerConfig, **others: Any):
        super().__init__(config, MoESubmodules(experts=Experts, router=Router), **others)

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        """Tokens in their order, their experts' outputs summed in float32 at least."""
        wide = output.to(torch.promote_types(output.dtype, torch.float32))
        return super().postprocess(wide, shared_expert_output).to(output.dtype)


def busiest_share(chunks: Iterable[nn.Module]) -> float:
    """The largest part of a layer's choices that went to one expert since the last call, over all layers and
    tokens of all ranks; with even routing 1 / E. Collective."""
    routers = [one for chunk in chunks for one in chunk.modules() if isinstance(one, Router)]
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    share = torch.zeros(())
    if routers:
        counts = torch.stack([router.counts for router in routers])
        for router in routers:
            router.counts.zero_()
        total = process_group.all_reduce(counts, "sum", group)
        share = (total.amax(-1) / total.sum(-1).clamp(min=1)).amax()
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    return float(process_group.all_reduce(share, "max", pipeline))
