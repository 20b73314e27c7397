"""REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740).

The baseline of a trajectory is the mean score of the other k - 1 trajectories of its prompt:

    A = score - mean of the others = k / (k - 1) * (score - mean of the group)

A group of one has no others: its baseline is 0 and its advantage its score, as in GRPO. (verl's two variants
disagree here: `rloo` leaves the score, `rloo_vectorized` gives 0.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraflow.algorithms.groups import group_scores
from hydraflow.algorithms.masked import keep


@torch.no_grad()
def rloo(rewards: Tensor, mask: Tensor, *, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns (the same numbers), (B, R) each, 0 where the mask is 0.

    `rewards`, `mask`: (B, R); `group_ids`: (B,) integer, equal for the trajectories of one prompt.

    >>> rewards, mask = torch.tensor([[1.0], [2.0], [6.0]]), torch.ones(3, 1)
    >>> rloo(rewards, mask, group_ids=torch.tensor([0, 0, 0]))[0].tolist()
    [[-3.0], [-1.5], [4.5]]
    """
    scores = rewards.sum(dim=1)  # (B,)
    group = group_scores(scores, group_ids)
    others = (group.size - 1).clamp(min=1).to(scores.dtype)
    advantage = torch.where(group.size == 1, scores, group.centred * group.size / others)  # (B,)
    advantages = keep(advantage[:, None].expand_as(rewards), mask)
    return advantages, advantages.clone()
