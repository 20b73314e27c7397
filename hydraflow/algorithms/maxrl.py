"""Maximum likelihood reinforcement learning (Tajwar et al. 2026, https://arxiv.org/abs/2602.02710).

    A = (score - mean of the group) / mean of the group

For scores of 0 and 1: prompts are weighted by the inverse of their success rate, as in the gradient of the
log of the success probability. A group whose mean is not above 0 gets advantages of 0. A group of one gets 0,
because its score is its mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraflow.algorithms.groups import Groups

_ROUNDING = 1e-6
"""A mean that is smaller than this share of the largest score counts as 0."""


def maxrl(scores: Tensor, *, group_ids: Tensor) -> Tensor:
    """Advantages (B,) of trajectories with these scores (B,), which should be 0 or 1.

    `group_ids`: (B,) integer, equal for the trajectories of one prompt.

    >>> maxrl(torch.tensor([1.0, 0.0, 0.0, 0.0]), group_ids=torch.zeros(4, dtype=torch.int64)).tolist()
    [3.0, -1.0, -1.0, -1.0]
    """
    groups = Groups(group_ids)
    mean = groups.sums(scores) / groups.size  # (B,)
    is_above = mean > _ROUNDING * groups.best(scores.abs())
    return torch.where(is_above, groups.centred(scores) / mean.where(is_above, torch.ones_like(mean)), 0.0)
