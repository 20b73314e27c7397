"""Statistics over groups of rows: the trajectories that share a prompt.

In: one integer group id per row (B,), any integers, in any order, and columns (B,). Out: per row (B,) the
statistic of its group. No Python loop over rows or groups.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Groups:
    """The groups of B rows.

    >>> groups, column = Groups(torch.tensor([0, 0, 7])), torch.tensor([1.0, 5.0, 2.0])
    >>> groups.sums(column).tolist(), groups.best(column).tolist()
    ([6.0, 6.0, 2.0], [5.0, 5.0, 2.0])
    """

    def __init__(self, ids: Tensor):
        _, self.index, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        """The group of each row, (B,), numbered from 0."""
        self._count = len(counts)
        self.size = counts[self.index]
        """Rows in each row's group, (B,) int64."""

    def sums(self, column: Tensor) -> Tensor:
        """The sum (B,) of a column (B,) over each row's group."""
        return column.new_zeros(self._count).index_add(0, self.index, column)[self.index]

    def best(self, scores: Tensor) -> Tensor:
        """The highest score (B,) of each row's group."""
        lowest = scores.new_full((self._count,), -torch.inf)
        return lowest.scatter_reduce(0, self.index, scores, reduce="amax")[self.index]

    def centred(self, scores: Tensor, weights: Tensor | None = None) -> Tensor:
        """Scores (B,) less the mean of their groups; exactly 0 where a group's scores are all equal.

        weights (B,), at least 0: how much each row counts in the mean; None: all count the same. A group
        without any weight is centred on its lowest score.

        >>> scores, ids = torch.tensor([1.0, 5.0]), torch.tensor([0, 0])
        >>> Groups(ids).centred(scores, torch.tensor([3, 1])).tolist()
        [-1.0, 3.0]
        """
        # Each group's lowest score becomes 0. Otherwise rounding of the mean of equal scores (0.1, 0.1, 0.1)
        # leaves a difference near 1e-8, and division by a standard deviation of 0 + 1e-6 makes it a signal.
        raised = scores + self.best(-scores)
        weights = torch.ones_like(scores) if weights is None else weights.to(scores.dtype)
        total = self.sums(weights)
        return raised - self.sums(weights * raised) / total.where(total > 0, torch.ones_like(total))

    def std(self, scores: Tensor) -> Tensor:
        """The unbiased standard deviation (B,) of each row's group; 0 for a group of one."""
        return (self.sums(self.centred(scores) ** 2) / (self.size - 1).clamp(min=1)).sqrt()
