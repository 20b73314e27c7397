"""Geometric-mean policy optimization, GMPO (Zhao et al. 2025, https://arxiv.org/abs/2507.20673).

    d_t  = logp_t - old_logp_t, at most clip_ratio_high where A > 0, at least -clip_ratio_low where A < 0
    loss = -A exp(mean of d over the row's trained tokens)

The ratio is the geometric mean of the row's clipped ratios, one number for all of its tokens. The bounds
apply to the logarithm; the paper uses 0.4. The paper averages over each sequence first, as
`actor.loss_agg_mode=seq-mean-token-mean` does.
"""

from __future__ import annotations

import torch

from hydraflow.algorithms.policy_loss import bounded, row_means
from hydraflow.algorithms.token_terms import TokenInputs, TokenTerms, keep


def geo_mean(tokens: TokenInputs, *, clip_ratio_low: float, clip_ratio_high: float) -> TokenTerms:
    """Statistics: `actor/pg_clipfrac` tokens whose ratio was clipped.

    >>> logp = torch.tensor([[0.1, 0.5]])
    >>> tokens = TokenInputs(logp, torch.zeros(1, 2), advantages=torch.ones(1, 2), mask=torch.ones(1, 2))
    >>> geo_mean(tokens, clip_ratio_low=0.4, clip_ratio_high=0.4).loss  # exp of the mean of 0.1 and 0.4
    tensor([[-1.2840, -1.2840]])
    """
    gap = keep(tokens.log_probs - tokens.old_log_probs, tokens.mask)
    clipped = torch.where(
        tokens.advantages > 0, gap.clamp(max=clip_ratio_high), gap.clamp(min=-clip_ratio_low)
    )
    ratio = bounded(row_means(clipped, tokens.mask)).exp()  # (B, 1)
    return TokenTerms(-tokens.advantages * ratio, {"actor/pg_clipfrac": (clipped != gap).to(gap.dtype)})
