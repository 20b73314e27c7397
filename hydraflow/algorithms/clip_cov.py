"""Clip-Cov (Cui et al. 2025, https://arxiv.org/abs/2505.22617, section 4.2): PPO's clipped objective, in
which a few tokens of high covariance (`covariance.py`) have no gradient.

    chosen = clip_cov_ratio of all trained tokens, at random among those with clip_cov_lb < cov < clip_cov_ub
    loss   = max(-A ratio, -A clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)), constant where chosen
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraflow.algorithms.policy_loss import bounded_log_ratio
from hydraflow.algorithms.token_terms import TokenInputs, TokenTerms


def choose(
    covariances: Tensor, draws: Tensor, *, clip_cov_ratio: float, clip_cov_lb: float, clip_cov_ub: float
) -> tuple[Tensor, float]:
    """See `TokenChoice`.

    >>> choose(torch.tensor([0.5, 2.0, 9.0]), torch.tensor([0.9, 0.4, 0.6]), clip_cov_ratio=0.5,
    ...        clip_cov_lb=1.0, clip_cov_ub=5.0)
    (tensor([  -inf, 0.4000,   -inf]), 0.5)
    """
    inside = (covariances > clip_cov_lb) & (covariances < clip_cov_ub)
    return draws.masked_fill(~inside, -torch.inf), clip_cov_ratio


def clip_cov(tokens: TokenInputs, *, clip_ratio_low: float, clip_ratio_high: float) -> TokenTerms:
    """Statistics: `actor/cov_chosen` the chosen tokens, `actor/pg_clipfrac` those and tokens whose ratio was
    clipped."""
    assert tokens.chosen is not None, "clip_cov needs tokens.chosen"
    ratio, advantages = bounded_log_ratio(tokens).exp(), tokens.advantages
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    loss = torch.maximum(plain, clipped)
    stats = {
        "actor/cov_chosen": tokens.chosen.to(ratio.dtype),
        "actor/pg_clipfrac": (tokens.chosen | (clipped > plain)).to(ratio.dtype),
    }
    return TokenTerms(torch.where(tokens.chosen, loss.detach(), loss), stats)
