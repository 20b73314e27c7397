"""Aggregates per-token losses to one loss: a weight for every token, such that `loss = (per_token *
weights).sum()`.

In: a micro-batch's mask and the counts of the whole mini-batch (all data ranks, all micro-batches), taken
from the same mask. Out: weights. Because the counts are global, the losses and gradients of the parts add up
to those of the whole, however the rows were split, ordered or padded. Left out on purpose: any mean over a
micro-batch, and any factor for the number of ranks (gradients are summed).

A sequence counts if at least one of its tokens is trained. (verl divides by all sequences, empty ones
included.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Denominators:
    """Counts over one mini-batch; add those of its parts and ranks."""

    tokens: float
    """Trained tokens."""
    sequences: float
    """Sequences with at least one trained token."""

    @classmethod
    def count(cls, mask: Tensor) -> Denominators:
        """Counts in a mask (B, R).

        >>> Denominators.count(torch.tensor([[1, 1, 0], [0, 0, 0]]))
        Denominators(tokens=2.0, sequences=1.0)
        """
        trained = mask.bool()
        return cls(float(trained.sum()), float(trained.any(dim=1).sum()))

    def __add__(self, other: Denominators) -> Denominators:
        return Denominators(self.tokens + other.tokens, self.sequences + other.sequences)


def _one_over_lengths(trained: Tensor) -> Tensor:
    return 1.0 / trained.sum(dim=1, keepdim=True, dtype=torch.float64).clamp(min=1.0)  # (B, 1)


# The weight of a trained token: a number, or (B, 1). A count is 0 only where the mask is all 0.
LOSS_AGG_MODES: dict[str, Callable[[Tensor, Denominators, float], Tensor | float]] = {
    "token-mean": lambda trained, n, scale: 1.0 / max(n.tokens, 1.0),
    "token-sum": lambda trained, n, scale: 1.0,
    "seq-mean-token-sum": lambda trained, n, scale: 1.0 / max(n.sequences, 1.0),
    "seq-mean-token-mean": lambda trained, n, scale: _one_over_lengths(trained) / max(n.sequences, 1.0),
    "seq-mean-token-sum-norm": lambda trained, n, scale: 1.0 / (max(n.sequences, 1.0) * scale),
}


def token_weights(
    mask: Tensor, mode: str, denominators: Denominators, scale_factor: float, *, dtype: torch.dtype
) -> Tensor:
    """Weights (B, R) of `dtype`, 0 where the mask is 0.

    `mode` is one of LOSS_AGG_MODES. `scale_factor` divides in seq-mean-token-sum-norm only:
    actor.loss_scale_factor, by default data.max_response_length, never a padded width.
    """
    trained = mask.bool()
    return (trained.to(dtype) * LOSS_AGG_MODES[mode](trained, denominators, scale_factor)).to(dtype)
