"""Generalised advantage estimation (Schulman et al. 2016, https://arxiv.org/abs/1506.02438, equation 16).

    delta_t = r_t + gamma * V_next(t) - V_t
    A_t     = delta_t + gamma * lam * A_next(t)
    return  = A_t + V_t

`next(t)` is the next token that is trained (mask 1). Tokens with mask 0 between two turns (observations) are
skipped: they neither discount nor contribute their values, and a reward on one of them is
ignored. After the last trained token the value is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraflow.algorithms.trained_tokens import TrainedTokens, whiten


@torch.no_grad()
def gae(
    rewards: Tensor, mask: Tensor, lengths: Tensor, *, values: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Whitened advantages and returns, (N,) each, 0 where the mask is 0.

    `rewards`, `mask`, `values`: (N,), the tokens of all rows; `lengths`: (B,). The returns are taken before
    the whitening, which spans all rows.
    """
    tokens = TrainedTokens(mask, lengths)
    rewards, values = tokens.of(rewards), tokens.of(values)  # (n,)
    delta = rewards + gamma * tokens.following(values) - values
    advantages = tokens.discounted(delta, gamma * lam)
    return tokens.put_back(whiten(advantages)), tokens.put_back(advantages + values)
