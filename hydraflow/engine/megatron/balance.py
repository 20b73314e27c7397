"""Load balancing of experts, off by default: an auxiliary loss per row, and updates of router biases.

In: a router's logits, and the row of each of its tokens. Out: a loss whose gradient reaches the router
through the weights that it returns; updated biases. The loss is a sum over rows (DeepSeek-V3,
arXiv:2412.19437, equations 17 to 20, Megatron-Core's `seq_aux_loss`), so its gradient does not depend on how
rows are split into micro-batches. Left out on purpose: losses over all tokens of a micro-batch (`aux_loss`,
`global_aux_loss`, `z_loss`), whose gradient does.

Legend: n tokens of this rank's share of a line, B rows, T tokens of a row, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hydraflow.algorithms.trained_tokens import row_sums
from hydraflow.models.packing import PackedBatch, read_tokens
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto


@dataclass(frozen=True)
class BalancedRows:
    """Rows of the balancing loss, seen from this rank's share of their line. A token of a shared prompt
    belongs to every row that shares it."""

    at: torch.Tensor
    """(M,) tokens of the share, row by row."""
    row: torch.Tensor
    """(M,) the row of each of these tokens."""
    tokens: torch.Tensor
    """(B,) T of each row, on all ranks."""
    weight: torch.Tensor
    """(B,) weight of each row's loss; 0: the row is not trained."""
    groups: Sequence[dist.ProcessGroup]
    """Process groups of the ranks that share the line; summing over one after the other sums over all
    ranks."""

    @classmethod
    def of(
        cls,
        data: DataProto,
        batch: PackedBatch,
        own: slice,
        weight: float,
        groups: Sequence[dist.ProcessGroup],
    ) -> BalancedRows:
        """own: this rank's slice of the line; weight: of each trained row."""
        read = read_tokens(data)
        row = torch.repeat_interleave(read)
        is_here = (batch.places >= own.start) & (batch.places < own.stop)
        device = batch.input_ids.device
        return cls(
            at=(batch.places[is_here] - own.start).to(device),
            row=row[is_here].to(device),
            tokens=read.to(device),
            weight=(trained(data) * weight).to(device),
            groups=groups,
        )


def trained(data: DataProto) -> torch.Tensor:
    """(B,) whether a row has a trained token."""
    return row_sums(*ragged.parts(data.get("response_mask"))) > 0


def balance_loss(scores: torch.Tensor, chosen: int, rows: BalancedRows) -> torch.Tensor:
    """() this rank's part of the loss, with a gradient; a row with perfectly even routing has a loss of 1
    before its weight is applied.

    scores: (n, E), adding up to 1 for each token. chosen: K. Collective.

        L = E / (K T^2) * sum over e of (tokens of the row that choose e) * (sum over tokens of scores[e])
    """
    experts = scores.shape[1]
    best = scores.detach().topk(chosen, dim=1).indices
    choices = torch.zeros_like(scores, requires_grad=False).scatter_(1, best, 1.0)
    counts = scores.new_zeros(len(rows.tokens), experts).index_add_(0, rows.row, choices[rows.at])
    for group in rows.groups:
        dist.all_reduce(counts, group=group)
    factors = rows.weight.to(scores.dtype) * experts / (chosen * rows.tokens.to(scores.dtype).square())
    of_tokens = torch.zeros_like(scores, requires_grad=False)
    of_tokens.index_add_(0, rows.at, (counts * factors[:, None])[rows.row])
    return (of_tokens * scores).sum()


class AddLoss(torch.autograd.Function):
    """Identity on the weights that adds a loss term: in the backward pass the term gets a gradient of 1, as a
    summand of the total loss would."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], torch.ones_like(ctx.saved_tensors[0])


def updated_biases(bias: torch.Tensor, counts: torch.Tensor, rate: float) -> torch.Tensor:
    """(E,) router biases after `counts` tokens went to each expert: raised by the rate where an expert had
    fewer than the average, lowered where it had more (Wang et al. 2024, arXiv:2408.15664).

    >>> updated_biases(torch.zeros(3), torch.tensor([4.0, 1.0, 1.0]), 0.5)
    tensor([-0.5000,  0.5000,  0.5000])
    """
    counts = counts.to(device=bias.device, dtype=torch.float64)
    return bias + rate * (counts.mean() - counts).sign().to(bias.dtype)
