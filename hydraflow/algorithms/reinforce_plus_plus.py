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

from hydraflow.algorithms.trained_tokens import TrainedTokens, whiten


@torch.no_grad()
def reinforce_plus_plus(
    rewards: Tensor, mask: Tensor, lengths: Tensor, *, gamma: float
) -> tuple[Tensor, Tensor]:
    """Whitened advantages and unwhitened returns, (N,) each, 0 where the mask is 0.

    `rewards`, `mask`: (N,), the tokens of all rows; `lengths`: (B,).

    >>> rewards, mask = torch.tensor([1.0, 50.0, 2.0]), torch.tensor([1, 0, 1])
    >>> reinforce_plus_plus(rewards, mask, torch.tensor([3]), gamma=0.5)[1].tolist()
    [2.0, 0.0, 2.0]
    """
    tokens = TrainedTokens(mask, lengths)
    returns = tokens.discounted(tokens.of(rewards), gamma)  # (n,)
    return tokens.put_back(whiten(returns)), tokens.put_back(returns)
