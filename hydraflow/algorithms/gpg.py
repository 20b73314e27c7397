"""Group policy gradient (Chu et al. 2025, https://arxiv.org/abs/2504.02546), as verl defines it.

    A     = alpha * (score - mean of the group)
    alpha = trajectories of the step / those with a score other than 0

The factor compensates for trajectories without a gradient: for verl those with a score of 0, for the paper
those whose group has equal scores. A group of one has mean 0, as in GRPO.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraflow.algorithms.groups import Groups


def gpg(scores: Tensor, *, group_ids: Tensor) -> Tensor:
    """Advantages (B,) of all trajectories of a step, with these scores (B,).

    `group_ids`: (B,) integer, equal for the trajectories of one prompt.

    >>> gpg(torch.tensor([0.0, 2.0, 0.0, 0.0]), group_ids=torch.tensor([0, 0, 1, 1])).tolist()  # alpha = 4
    [-4.0, 4.0, 0.0, 0.0]
    """
    groups = Groups(group_ids)
    alpha = len(scores) / scores.count_nonzero().clamp(min=1).to(scores.dtype)
    return alpha * torch.where(groups.size == 1, scores, groups.centred(scores))
