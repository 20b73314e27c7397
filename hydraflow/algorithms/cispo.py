"""Clipped importance-sampling policy optimisation, CISPO (MiniMax 2025, https://arxiv.org/abs/2506.13585),
equations 4 and 5.

    loss = -A stop_gradient(clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)) logp

The weight is clipped and not the objective, so every token keeps a gradient. The paper leaves the lower side
open (`actor.clip_ratio_low=1`) and tunes the upper one.
"""

from __future__ import annotations

from hydraflow.algorithms.policy_loss import bounded_log_ratio
from hydraflow.algorithms.token_terms import TokenInputs, TokenTerms


def cispo(tokens: TokenInputs, *, clip_ratio_low: float, clip_ratio_high: float) -> TokenTerms:
    """Statistics: `actor/pg_clipfrac` tokens whose weight was clipped.

    >>> import torch
    >>> logp, zero = torch.tensor([[0.5]]).log(), torch.zeros(1, 1)
    >>> tokens = TokenInputs(logp, zero, advantages=zero + 2, mask=zero + 1)
    >>> cispo(tokens, clip_ratio_low=0.2, clip_ratio_high=0.2).loss  # -2 * 0.8 * log 0.5
    tensor([[1.1090]])
    """
    ratio = bounded_log_ratio(tokens).detach().exp()
    weight = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    stats = {"actor/pg_clipfrac": (weight != ratio).to(ratio.dtype)}
    return TokenTerms(-tokens.advantages * weight * tokens.log_probs, stats)
