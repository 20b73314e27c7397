"""REINFORCE++ (Hu 2025, https://arxiv.org/abs/2501.03262): advantages whitened over all trained tokens of the
step.

    G_t = r_t + gamma * G_next(t)
    A   = whiten(G), or with a baseline A = whiten(score - mean of the group)

Without whitening, A = G, it is REINFORCE (Williams 1992, https://doi.org/10.1007/BF00992696).

`next(t)` is the next token that is trained (mask 1). Tokens with mask 0 between two turns are skipped
without a discount, and a reward on one of them is ignored.
"""

from __future__ import annotations

from torch import Tensor

from hydraflow.algorithms.grpo import grpo
from hydraflow.algorithms.trained_tokens import TrainedTokens


def discounted_return(
    rewards: Tensor, mask: Tensor, lengths: Tensor, *, gamma: float
) -> tuple[Tensor, Tensor]:
    """Advantages, before they are whitened, and returns, (N,) each and equal, 0 where the mask is 0.

    `rewards`, `mask`: (N,), the tokens of all rows; `lengths`: (B,).

    >>> import torch
    >>> rewards, mask = torch.tensor([1.0, 50.0, 2.0]), torch.tensor([1, 0, 1])
    >>> discounted_return(rewards, mask, torch.tensor([3]), gamma=0.5)[1].tolist()
    [2.0, 0.0, 2.0]
    """
    tokens = TrainedTokens(mask, lengths)
    returns = tokens.put_back(tokens.discounted(tokens.of(rewards), gamma))
    return returns, returns


def reinforce_plus_plus_baseline(scores: Tensor, *, group_ids: Tensor) -> Tensor:
    """Advantages (B,), before they are whitened, of trajectories with these scores (B,): Dr. GRPO's.

    `group_ids`: (B,) integer, equal for the trajectories of one prompt.
    """
    return grpo(scores, group_ids=group_ids, norm_adv_by_std_in_grpo=False)
