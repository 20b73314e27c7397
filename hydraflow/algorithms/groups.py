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
    """Scores (B,) centred in their groups."""
    index, counts, raised = _raised(scores, ids)
    count, zeros = counts.to(scores.dtype), scores.new_zeros(len(counts))
    centred = raised - (zeros.index_add(0, index, raised) / count)[index]
    variance = zeros.index_add(0, index, centred**2) / (count - 1).clamp(min=1)
    return GroupScores(centred=centred, std=variance.sqrt()[index], size=counts[index])


def centred_by_weight(scores: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Scores (B,) less the mean of their groups, in which each row counts by its weight (B,), at least 0.

    Exactly 0 where a group's scores are all equal. A group without any weight is centred on its lowest score.

    >>> scores, ids = torch.tensor([1.0, 5.0]), torch.tensor([0, 0])
    >>> centred_by_weight(scores, ids, torch.tensor([3, 1])).tolist()
    [-1.0, 3.0]
    """
    index, counts, raised = _raised(scores, ids)
    weights, zeros = weights.to(scores.dtype), scores.new_zeros(len(counts))
    total = zeros.index_add(0, index, weights)
    means = zeros.index_add(0, index, weights * raised) / total.where(total > 0, torch.ones_like(total))
    return raised - means[index]


def group_best(scores: Tensor, ids: Tensor) -> Tensor:
    """The highest score (B,) of each row's group.

    >>> group_best(torch.tensor([1.0, 5.0, 2.0]), torch.tensor([0, 0, 7])).tolist()
    [5.0, 5.0, 2.0]
    """
    _, index = torch.unique(ids, return_inverse=True)
    lowest = scores.new_full((int(index.max()) + 1 if len(index) else 0,), -torch.inf)
    return lowest.scatter_reduce(0, index, scores, reduce="amax")[index]


def group_sums(column: Tensor, ids: Tensor) -> Tensor:
    """The sum (B,) of a column (B,) over each row's group.

    >>> group_sums(torch.tensor([1.0, 5.0, 2.0]), torch.tensor([0, 0, 7])).tolist()
    [6.0, 6.0, 2.0]
    """
    _, index, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    return column.new_zeros(len(counts)).index_add(0, index, column)[index]


def _raised(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The group (B,) of each row, numbered from 0; the size of each group (G,); and the scores (B,), shifted
    so that each group's lowest is 0.

    Otherwise rounding of the mean of equal scores (0.1, 0.1, 0.1) leaves a difference near 1e-8, which
    division by a standard deviation of 0 + 1e-6 turns into a signal.
    """
    _, index, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    zeros = scores.new_zeros(len(counts))
    lowest = zeros.scatter_reduce(0, index, scores, reduce="amin", include_self=False)
    return index, counts, scores - lowest[index]
