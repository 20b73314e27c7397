"""REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740).

The baseline of a trajectory is the mean score of the other k - 1 trajectories of its prompt:

    A = score - mean of the others = k / (k - 1) * (score - mean of the group)

A group of one has no others. With `rloo` its baseline is 0 and its advantage its score, as in GRPO; with
`rloo_vectorized` its advantage is 0, as in verl. The two do not differ otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraflow.algorithms.groups import Groups


def rloo(scores: Tensor, *, group_ids: Tensor) -> Tensor:
    """Advantages (B,) of trajectories with these scores (B,).

    `group_ids`: (B,) integer, equal for the trajectories of one prompt.

    >>> rloo(torch.tensor([1.0, 2.0, 6.0]), group_ids=torch.tensor([0, 0, 0])).tolist()
    [-3.0, -1.5, 4.5]
    """
    alone = Groups(group_ids).size == 1
    return torch.where(alone, scores, rloo_vectorized(scores, group_ids=group_ids))


def rloo_vectorized(scores: Tensor, *, group_ids: Tensor) -> Tensor:
    """As `rloo`, with 0 for a group of one.

    >>> rloo_vectorized(torch.tensor([1.0, 2.0, 6.0]), group_ids=torch.tensor([0, 0, 8])).tolist()
    [-1.0, 1.0, 0.0]
    """
    groups = Groups(group_ids)
    others = (groups.size - 1).clamp(min=1).to(scores.dtype)
    return groups.centred(scores) * groups.size / others
