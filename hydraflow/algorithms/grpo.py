"""Group relative policy optimisation (Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2).

    A = (score - mean of the group) / (std of the group + 1e-6)

with the unbiased standard deviation. Without the division it is Dr. GRPO (Liu et al. 2025,
https://arxiv.org/abs/2503.20783). A group of one has nothing to compare with: its mean is taken as 0 and its
standard deviation as 1, so its advantage is its score.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraflow.algorithms.groups import Groups


def grpo(scores: Tensor, *, group_ids: Tensor, norm_adv_by_std_in_grpo: bool = True) -> Tensor:
    """Advantages (B,) of trajectories with these scores (B,).

    `group_ids`: (B,) integer, equal for the trajectories of one prompt.

    >>> scores, ids = torch.tensor([1.0, 3.0]), torch.tensor([7, 7])
    >>> grpo(scores, group_ids=ids, norm_adv_by_std_in_grpo=False).tolist()
    [-1.0, 1.0]
    """
    groups = Groups(group_ids)
    alone = groups.size == 1
    advantages = torch.where(alone, scores, groups.centred(scores))
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (torch.where(alone, 1.0, groups.std(scores)) + 1e-6)
    return advantages
