"""Group relative policy optimisation (Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2).

    A = (score - mean of the group) / (std of the group + 1e-6)

with one score per trajectory, the sum of its token rewards, and the unbiased standard deviation. Without the
division it is Dr. GRPO (Liu et al. 2025, https://arxiv.org/abs/2503.20783). A group of one has nothing to
compare with: mean 0 and standard deviation 1 are taken, so its advantage is its score.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraflow.algorithms.groups import group_scores
from hydraflow.algorithms.masked import keep


@torch.no_grad()
def grpo(
    rewards: Tensor,
    mask: Tensor,
    *,
    group_ids: Tensor,
    norm_adv_by_std_in_grpo: bool = True,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (the same numbers), (B, R) each, 0 where the mask is 0.

    `rewards`, `mask`: (B, R); `group_ids`: (B,) integer, equal for the trajectories of one prompt.

    >>> rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 3.0]]), torch.ones(2, 2)
    >>> grpo(rewards, mask, group_ids=torch.tensor([7, 7]), norm_adv_by_std_in_grpo=False)[0].tolist()
    [[-1.0, -1.0], [1.0, 1.0]]
    """
    scores = rewards.sum(dim=1)  # (B,)
    group = group_scores(scores, group_ids)
    alone = group.size == 1
    advantage = torch.where(alone, scores, group.centred)  # (B,)
    if norm_adv_by_std_in_grpo:
        advantage = advantage / (torch.where(alone, 1.0, group.std) + eps)
    advantages = keep(advantage[:, None].expand_as(rewards), mask)
    return advantages, advantages.clone()
