"""The critic's loss per token.

In: values now, values at the step's start, returns, (B, R) each. Out: the loss per token, which
`aggregate.py` weighs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraflow.algorithms.token_terms import TokenTerms


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
