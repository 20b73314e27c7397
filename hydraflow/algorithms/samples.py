"""Rows and samples: a sample is one row, or several that belong together (the turns of a conversation, say).

In: columns of rows. Out: columns of samples, and back. Estimators that compare the responses to one prompt
compare samples, so that several rows count once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Samples:
    """The samples of B rows.

    >>> samples = Samples.of(torch.tensor([7, 7, 7]), torch.tensor([0, 1, 1]))
    >>> samples.mean(torch.tensor([5.0, 1.0, 3.0])).tolist(), samples.sum(torch.tensor([2, 3, 4])).tolist()
    ([5.0, 2.0], [2, 7])
    >>> samples.to_rows(torch.tensor([0.5, 0.25])).tolist()
    [0.5, 0.25, 0.25]
    """

    index: Tensor | None
    """(B,) the sample of each row, numbered from 0; None: every row is a sample."""

    @classmethod
    def of(cls, group_ids: Tensor | None, samples: Tensor | None) -> Samples:
        """From the numbers of group and sample of each row, (B,); None: every row is a sample."""
        if group_ids is None or samples is None:
            return cls(None)
        index, of_sample = numbered(group_ids, samples)
        return cls(index if len(of_sample) < len(index) else None)

    def sum(self, column: Tensor) -> Tensor:
        """Sums (S,) or (S, K) over the rows of each sample, of a column (B,) or (B, K)."""
        if self.index is None:
            return column
        return column.new_zeros((self._count(), *column.shape[1:])).index_add(0, self.index, column)

    def mean(self, column: Tensor) -> Tensor:
        """Means over the rows of each sample, as `sum`, of a floating column; of equal values exactly these,
        so that samples whose rows all have the same score tie."""
        if self.index is None:
            return column
        rows = torch.bincount(self.index)
        return (self.sum(column.double()) / (rows if column.dim() == 1 else rows[:, None])).to(column.dtype)

    def first(self, column: Tensor) -> Tensor:
        """(S,) values of a column (B,) that is constant within a sample."""
        if self.index is None:
            return column
        return column.new_zeros(self._count()).scatter(0, self.index, column)

    def to_rows(self, column: Tensor) -> Tensor:
        """Broadcasts a column (S,) to the rows of each sample, (B,)."""
        return column if self.index is None else column[self.index]

    def _count(self) -> int:
        assert self.index is not None
        return int(self.index.max()) + 1


def numbered(group_ids: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    """The sample (B,) of each row, and the group (S,) of each sample, both numbered from 0 in the order of
    their ids.

    >>> index, of_sample = numbered(torch.tensor([9, 4, 4, 4]), torch.tensor([0, 2, 1, 2]))
    >>> index.tolist(), of_sample.tolist()
    ([2, 1, 0, 1], [0, 0, 1])
    """
    _, group = torch.unique(group_ids, return_inverse=True)
    known, sample = torch.unique(samples, return_inverse=True)
    # pairs as single numbers: torch.unique along a dimension compares row by row and takes ten times as long
    pairs, index = torch.unique(group * len(known) + sample, return_inverse=True)
    return index, torch.div(pairs, max(1, len(known)), rounding_mode="floor")
