"""Divergence proximal policy optimization, DPPO (Qi et al. 2026, https://arxiv.org/abs/2602.04879), with its
binary estimates of the divergence: of the sampled token against all others.

    dppo_tv: D = |p - p_old|
    dppo_kl: D = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))

    keep = 0 where the step leads away (p > p_old and A > 0, or p < p_old and A < 0) and D is above its bound:
           clip_ratio_high where A > 0, clip_ratio_low where A < 0
    loss = -A keep stop_gradient(min(p / p_old, clip_ratio_c)) logp

The gradient is that of the paper's objective, A keep p / p_old, except for ratios above clip_ratio_c, which
are truncated as in verl.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraflow.algorithms.policy_loss import bounded_log_ratio
from hydraflow.algorithms.token_terms import TokenInputs, TokenTerms


def dppo_tv(
    tokens: TokenInputs, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float
) -> TokenTerms:
    """Total variation. Statistics: `actor/pg_clipfrac` tokens without a gradient, `actor/pg_clipfrac_lower`
    kept tokens whose ratio was truncated.

    >>> logp, old = torch.tensor([[0.5]]).log(), torch.tensor([[0.4]]).log()
    >>> tokens = TokenInputs(logp, old, advantages=torch.ones(1, 1), mask=torch.ones(1, 1))
    >>> [dppo_tv(tokens, clip_ratio_low=0.2, clip_ratio_high=high, clip_ratio_c=3.0).loss.item() != 0
    ...  for high in (0.05, 0.2)]
    [False, True]
    """
    divergence = (tokens.log_probs.exp() - tokens.old_log_probs.exp()).detach().abs()
    return _within(tokens, divergence, clip_ratio_low, clip_ratio_high, clip_ratio_c)


def dppo_kl(
    tokens: TokenInputs, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float
) -> TokenTerms:
    """KL divergence. Statistics as in `dppo_tv`."""
    logp, old = tokens.log_probs.detach(), tokens.old_log_probs
    divergence = old.exp() * (old - logp) - old.expm1() * (_log_of_others(old) - _log_of_others(logp))
    return _within(tokens, divergence, clip_ratio_low, clip_ratio_high, clip_ratio_c)


def _log_of_others(logp: Tensor) -> Tensor:
    """log(1 - p), finite even where p is 1."""
    return (-logp.expm1()).clamp(min=torch.finfo(logp.dtype).tiny).log()


def _within(tokens: TokenInputs, divergence: Tensor, low: float, high: float, most: float) -> TokenTerms:
    log_ratio, rewarded = bounded_log_ratio(tokens), tokens.advantages > 0
    leads_away = torch.where(rewarded, log_ratio > 0, log_ratio < 0)
    keep = ~(leads_away & (divergence > torch.where(rewarded, high, low)))
    ratio = log_ratio.detach().exp()
    stats = {
        "actor/pg_clipfrac": (~keep).to(ratio.dtype),
        "actor/pg_clipfrac_lower": (keep & (ratio > most)).to(ratio.dtype),
    }
    return TokenTerms(-tokens.advantages * keep * ratio.clamp(max=most) * tokens.log_probs, stats)
