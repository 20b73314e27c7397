"""Inputs and results of losses, token by token, and the reduction of statistics to metrics.

In: tensors (B, R) and a mask. Out: `Metric`s that merge exactly over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hydraflow import metrics
from hydraflow.metrics import Metric

LossPart = tuple[Tensor, dict[str, Metric]]
"""A micro-batch's part of a mini-batch's loss, and its metrics; parts add up."""


@dataclass(frozen=True)
class TokenInputs:
    """Inputs of a policy loss for B rows with up to R response tokens: (B, R) each, 0 where `mask` is 0."""

    log_probs: Tensor
    """Log-probabilities of this forward pass; the gradient flows through them."""
    old_log_probs: Tensor
    """Log-probabilities of the old policy, the denominator of the ratio."""
    advantages: Tensor
    mask: Tensor
    """1 for trained tokens."""
    chosen: Tensor | None = None
    """bool: tokens selected over the whole mini-batch, for losses that select tokens."""


@dataclass(frozen=True)
class TokenTerms:
    """A loss per token and its statistics to report."""

    loss: Tensor
    """(B, R) before any weighting."""
    stats: dict[str, Tensor] = field(default_factory=dict)
    """Metric name -> (B, R); reported as means over trained tokens."""


@dataclass(frozen=True)
class ModelOutput:
    """A model's output for B rows with up to R response tokens: (B, R), right padded, 0 where
    response_mask is 0."""

    log_probs: Tensor | None = None
    """Log-probability of each response token (policy)."""
    entropy: Tensor | None = None
    """Entropy in nats of each token's distribution (policy, on request)."""
    values: Tensor | None = None
    """Value estimate for the state before each token (value model)."""
    target_log_probs: Tensor | None = None
    """(B, R, K): log-probabilities of the teacher's top-k tokens, for losses over them."""


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with 0 where the mask (bool, or numbers 0 and 1) is 0; no gradient flows there. The replaced
    values may be anything, NaN and infinity included."""
    # not a product with the mask: 0 * NaN is NaN
    return values.masked_fill(~mask.bool(), 0.0)


@torch.no_grad()
def token_metrics(mask: Tensor, stats: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> dict[str, Metric]:
    """Means over trained tokens of each of `stats` (B, R), and the sums of `sums` (scalars).

    Each of `sums` is a part of a loss whose parts add up.
    """
    # one stack, so that the host waits for the device only once
    scalars = [mask.bool().sum(), *(keep(stat, mask).sum() for stat in stats.values()), *sums.values()]
    count, *rest = torch.stack([scalar.detach().to(torch.float64) for scalar in scalars]).tolist()
    means = {name: metrics.mean(value / max(count, 1.0), count) for name, value in zip(stats, rest)}
    return means | {name: metrics.summed(value) for name, value in zip(sums, rest[len(stats) :])}
