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


@torch.no_grad()
def rloo(scores: Tensor, *, group_ids: Tensor) -> Tensor:
    """Advantages (B,) of trajectories with these scores (B,).

    `group_ids`: (B,) integer, equal for the trajectories of one prompt.

    >>> rloo(torch.tensor([1.0, 2.0, 6.0]), group_ids=torch.tensor([0, 0, 0])).tolist()
    [-3.0, -1.5, 4.5]
    """
    group = group_scores(scores, group_ids)
    others = (group.size - 1).clamp(min=1).to(scores.dtype)
    return torch.where(group.size == 1, scores, group.centred * group.size / others)
