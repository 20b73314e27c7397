"""REC, REINFORCE with a clip (Yao et al. 2025, https://arxiv.org/abs/2509.24203, section 4). Which tokens
have a gradient and how they are weighted are chosen separately.

    one-side  ratio <= 1 + clip_ratio_high where A > 0, >= 1 - clip_ratio_low where A < 0
    two-side  1 - clip_ratio_low <= ratio <= 1 + clip_ratio_high
    ring      two-side; and ratio <= 1 - rec_epsilon_low_prime where A > 0,
              >= 1 + rec_epsilon_high_prime where A < 0: a token far on the wrong side may come back
    none      all

    weight    1 (none), the ratio (importance_sampling), or exp(A / rec_temp) (advantage: RED-Weight)
    loss      -A stop_gradient(keep * weight) logp

one-side with importance sampling has the gradient of PPO's clip; the paper finds that the clip matters and
the ratio does not, and opens it to 0.6 and 2. Its regularized forms are `dro`, `kimi15` and the estimator
`asymre`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraflow.algorithms.policy_loss import LOG_RATIO_BOUND, bounded_log_ratio
from hydraflow.algorithms.token_terms import TokenInputs, TokenTerms


def rec(
    tokens: TokenInputs,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    rec_clip_mode: str,
    rec_weight: str,
    rec_temp: float,
    rec_epsilon_low_prime: float,
    rec_epsilon_high_prime: float,
) -> TokenTerms:
    """Statistics: `actor/pg_clipfrac` tokens without a gradient.

    >>> ratio, zero = torch.tensor([[0.5, 1.5]]), torch.zeros(1, 2)
    >>> tokens = TokenInputs(ratio.log(), zero, advantages=zero + 1, mask=zero + 1)
    >>> keys = {"rec_temp": 1.0, "rec_epsilon_low_prime": 0.6, "rec_epsilon_high_prime": 2.0}
    >>> rec(tokens, clip_ratio_low=0.2, clip_ratio_high=0.2, rec_clip_mode="one-side", rec_weight="none",
    ...     **keys).loss  # log 2, and nothing for the ratio above 1.2
    tensor([[0.6931, -0.0000]])
    """
    ratio, advantages = bounded_log_ratio(tokens).detach().exp(), tokens.advantages
    inner = 1 - clip_ratio_low, 1 + clip_ratio_high
    outer = 1 - rec_epsilon_low_prime, 1 + rec_epsilon_high_prime
    keep = _kept(rec_clip_mode, ratio, advantages, inner, outer)
    weight = keep.to(ratio.dtype) * _weights(rec_weight, ratio, advantages, rec_temp)
    return TokenTerms(-advantages * weight * tokens.log_probs, {"actor/pg_clipfrac": (~keep).to(ratio.dtype)})


def _kept(
    mode: str, ratio: Tensor, advantages: Tensor, inner: tuple[float, float], outer: tuple[float, float]
) -> Tensor:
    """bool (B, R): tokens that have a gradient. `inner`, `outer`: lower and upper bounds of the ratio."""
    rewarded = advantages > 0
    if mode == "one-side":
        return torch.where(rewarded, ratio <= inner[1], ratio >= inner[0])
    within = (ratio >= inner[0]) & (ratio <= inner[1])
    if mode == "two-side":
        return within
    if mode == "ring":
        return within | torch.where(rewarded, ratio <= outer[0], ratio >= outer[1])
    assert mode == "none", mode
    return torch.ones_like(rewarded)


def _weights(kind: str, ratio: Tensor, advantages: Tensor, temperature: float) -> Tensor:
    """(B, R), without a gradient."""
    if kind == "importance_sampling":
        return ratio
    if kind == "advantage":
        return (advantages / temperature).clamp(max=LOG_RATIO_BOUND).exp()
    assert kind == "none", kind
    return torch.ones_like(ratio)
