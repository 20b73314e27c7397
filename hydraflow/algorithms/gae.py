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

from hydraflow.algorithms.masked import keep, masked_whiten


@torch.no_grad()
def gae(rewards: Tensor, mask: Tensor, *, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Whitened advantages and returns, (B, R) each, 0 where the mask is 0.

    `rewards`, `values`, `mask`: (B, R), right padded. The returns are taken before the whitening, which spans
    all rows. The loop runs over time only, on time-major copies.
    """
    trained = mask.bool().T.contiguous()  # (R, B)
    rewards_t, values_t = rewards.T.contiguous(), values.T.contiguous()  # (R, B)
    advantages_t = torch.zeros_like(values_t)
    next_value = values.new_zeros(values.shape[0])  # (B,)
    next_advantage = torch.zeros_like(next_value)  # (B,)
    for t in reversed(range(values.shape[1])):
        delta = rewards_t[t] + gamma * next_value - values_t[t]
        next_advantage = torch.where(trained[t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(trained[t], values_t[t], next_value)
        advantages_t[t] = next_advantage
    advantages = advantages_t.T.contiguous()
    return masked_whiten(advantages, mask), keep(advantages + values, mask)
