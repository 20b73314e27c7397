"""Reward-ranked fine-tuning, RAFT (Dong et al. 2023, https://arxiv.org/abs/2304.06767): supervised learning
on the best of the group's own responses.

    A = 1 / (responses that share the best score) for each of those, 0 for the others

Where the paper draws one of several best responses, this is the mean over the draws. A group of equal scores
has no best response, nor has a group of one: their advantages are 0. The paper's loss, cross-entropy, is
`gpg`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraflow.algorithms.groups import Groups


def raft(scores: Tensor, *, group_ids: Tensor) -> Tensor:
    """Advantages (B,) of trajectories with these scores (B,).

    `group_ids`: (B,) integer, equal for the trajectories of one prompt.

    >>> raft(torch.tensor([0.0, 2.0, 2.0, 1.0, 1.0]), group_ids=torch.tensor([0, 0, 0, 8, 8])).tolist()
    [0.0, 0.5, 0.5, 0.0, 0.0]
    """
    groups = Groups(group_ids)
    is_best = scores == groups.best(scores)
    shares = groups.sums(is_best.to(scores.dtype))
    stands_out = is_best & (shares < groups.size)
    return torch.where(stands_out, 1 / shares, 0.0)
