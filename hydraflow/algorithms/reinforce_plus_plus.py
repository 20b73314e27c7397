"""REINFORCE++ (Hu 2025, https://arxiv.org/abs/2501.03262): discounted return to go, whitened over the whole
batch.

    G_t = r_t + gamma * G_next(t)
    A   = whiten(G)

`next(t)` is the next token that is trained (mask 1). Tokens with mask 0 between two turns are skipped
without a discount, and a reward on one of them is ignored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraflow.algorithms.masked import keep, masked_whiten


@torch.no_grad()
def return_to_go(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each trained token on, (B, R), 0 where the mask is 0.

    >>> return_to_go(torch.tensor([[1.0, 50.0, 2.0]]), torch.tensor([[1, 0, 1]]), gamma=0.5).tolist()
    [[2.0, 0.0, 2.0]]
    """
    trained, rewards_t = mask.bool().T.contiguous(), rewards.T.contiguous()  # (R, B)
    returns_t = torch.zeros_like(rewards_t)
    running = rewards.new_zeros(rewards.shape[0])  # (B,)
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(trained[t], rewards_t[t] + gamma * running, running)
        returns_t[t] = running
    return keep(returns_t.T.contiguous(), mask)


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, *, gamma: float) -> tuple[Tensor, Tensor]:
    """Whitened advantages and unwhitened returns, (B, R) each, 0 where the mask is 0. `rewards`, `mask`: (B,
    R)."""
    returns = return_to_go(rewards, mask, gamma=gamma)
    return masked_whiten(returns, mask), returns
