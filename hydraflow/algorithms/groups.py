"""Statistics over groups of rows: the trajectories that share a prompt.

In: one score per row (B,) and one integer group id per row (B,), any integers, in any order. Out: per row
(B,) the statistic of its group. No Python loop over rows or groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupScores:
    """Scores relative to their groups; every field is per row, (B,)."""

    centred: Tensor
    """Score less the mean of its group; exactly 0 where a group's scores are all equal."""
    std: Tensor
    """Unbiased standard deviation of the group; 0 for a group of one."""
    size: Tensor
    """Rows in the group, int64."""


def group_scores(scores: Tensor, ids: Tensor) -> GroupScores:
    """Scores (B,) centred in their groups.

    Each group is first moved so that its lowest score is 0. Without that, the rounding of the mean of equal
    scores (0.1, 0.1, 0.1) leaves a difference near 1e-8, which a division by a standard deviation of 0 + 1e-6
    makes a signal.
    """
    _, index, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    count = counts.to(scores.dtype)
    zeros = scores.new_zeros(len(counts))
    lowest = zeros.scatter_reduce(0, index, scores, reduce="amin", include_self=False)
    raised = scores - lowest[index]
    centred = raised - (zeros.index_add(0, index, raised) / count)[index]
    variance = zeros.index_add(0, index, centred**2) / (count - 1).clamp(min=1)
    return GroupScores(centred=centred, std=variance.sqrt()[index], size=counts[index])
