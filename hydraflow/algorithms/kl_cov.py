"""KL-Cov (Cui et al. 2025, https://arxiv.org/abs/2505.22617, section 4.2): the policy gradient without a
clip, in which a few tokens of the highest covariance (`covariance.py`) have a KL penalty against the old
policy.

    chosen = kl_cov_ratio of all trained tokens, those with the highest cov, if it is above 0
    loss   = -A ratio, plus ppo_kl_coef |logp - old_logp| where chosen

In a step's first update the two log-probabilities differ only by rounding, and the penalty's gradient is the
sign of that difference, as in the paper's code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraflow.algorithms.policy_loss import bounded_log_ratio
from hydraflow.algorithms.token_terms import TokenInputs, TokenTerms


def choose(covariances: Tensor, draws: Tensor, *, kl_cov_ratio: float) -> tuple[Tensor, float]:
    """See `TokenChoice`; nothing is drawn.

    >>> choose(torch.tensor([0.5, -2.0]), torch.zeros(2), kl_cov_ratio=0.5)
    (tensor([0.5000,   -inf]), 0.5)
    """
    return covariances.masked_fill(covariances <= 0, -torch.inf), kl_cov_ratio


def kl_cov(tokens: TokenInputs, *, ppo_kl_coef: float) -> TokenTerms:
    """Statistics: `actor/cov_chosen` the chosen tokens."""
    assert tokens.chosen is not None, "kl_cov needs tokens.chosen"
    log_ratio = bounded_log_ratio(tokens)
    penalty = torch.where(tokens.chosen, ppo_kl_coef * log_ratio.abs(), 0.0)
    stats = {"actor/cov_chosen": tokens.chosen.to(log_ratio.dtype)}
    return TokenTerms(-tokens.advantages * log_ratio.exp() + penalty, stats)
