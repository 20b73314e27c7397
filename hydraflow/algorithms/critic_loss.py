"""The critic's loss, per token and as a whole.

In: a forward pass over a micro-batch and its columns, right padded to (B, R). Out: this micro-batch's part of
the mini-batch's loss (parts add up), and metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hydraflow.algorithms.aggregate import Denominators, token_weights
from hydraflow.algorithms.token_terms import LossPart, ModelOutput, TokenTerms, keep, token_metrics


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange: float
) -> TokenTerms:
    """Squared error with the change of the values clipped, as in PPO's reference implementation.

        v_clip = clip(v, v_old - cliprange, v_old + cliprange)
        loss   = max((v - G)^2, (v_clip - G)^2) / 2

    Statistics: `critic/vf_clipfrac` tokens whose clipped error is the larger, `critic/vpred_mean` the values.
    """
    near = torch.minimum(torch.maximum(values, old_values - cliprange), old_values + cliprange)
    plain, clipped = (values - returns) ** 2, (near - returns) ** 2
    stats = {"critic/vf_clipfrac": (clipped > plain).to(values.dtype), "critic/vpred_mean": values.detach()}
    return TokenTerms(0.5 * torch.maximum(plain, clipped), stats)


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """loss = sum of weights * clipped value loss, for one mini-batch.

    Columns read: response_mask, values (those at the step's start), returns.
    Metrics: critic/vf_loss is a sum (parts of the mini-batch's loss), the others means over tokens.
    """

    denominators: Denominators
    """Counts of the whole mini-batch, over all data ranks."""
    scale_factor: float
    """Divisor of seq-mean-token-sum-norm; unused in other modes."""
    cliprange: float = 0.5
    """Clip range of PPO's value loss."""
    agg_mode: str = "token-mean"
    """A name of LOSS_AGG_MODES."""

    def __call__(self, output: ModelOutput, columns: Mapping[str, Tensor]) -> LossPart:
        assert output.values is not None, "the critic's loss needs values"
        mask = columns["response_mask"]
        values = keep(output.values, mask)  # (B, R)
        old_values, returns = keep(columns["values"], mask), keep(columns["returns"], mask)
        terms = clipped_value_loss(values, old_values, returns, cliprange=self.cliprange)
        weights = token_weights(mask, self.agg_mode, self.denominators, self.scale_factor, dtype=values.dtype)
        loss = (terms.loss * weights).sum()
        return loss, token_metrics(mask, terms.stats, {"critic/vf_loss": loss})
