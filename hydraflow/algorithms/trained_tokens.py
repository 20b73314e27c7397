"""The trained tokens of ragged rows: picked out, one time after the other, whitened, and put back.

In: flat columns (N,), the tokens of all rows one row after the other; their mask, and the lengths of the
rows. Out: the same columns with the trained tokens alone (n,), and the tokens at each time. Nothing is
padded. Left out on purpose: making flat columns (`protocol/ragged.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def row_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums (B,) float64 over the rows of a flat column (N,); 0 for a row without tokens.

    >>> row_sums(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([2, 0, 1])).tolist()
    [3.0, 0.0, 5.0]
    """
    rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)  # (N,)
    return torch.zeros(len(lengths), dtype=torch.float64).index_add_(0, rows, values.double())


class TrainedTokens:
    """The tokens of a step whose mask is 1; each row is what is left of it without the others."""

    def __init__(self, mask: Tensor, lengths: Tensor):
        self.mask = mask.bool()
        self.lengths = row_sums(self.mask, lengths).long()
        """Trained tokens of each row, (B,)."""

    def of(self, column: Tensor) -> Tensor:
        """The trained tokens (n,) of a column (N,)."""
        return column[self.mask]

    def put_back(self, values: Tensor) -> Tensor:
        """A column (N,) with these trained tokens (n,), and 0 elsewhere."""
        return values.new_zeros(len(self.mask)).masked_scatter_(self.mask, values)

    def backwards(self) -> Iterator[Tensor]:
        """Where the tokens at one time are in a column (n,), for each time, the last one first.

        (b,) each; the longest rows come first, so `state[:b]` of a state (B,) is that of the same rows at
        every time, and the rows beyond it have not begun.

        >>> tokens = TrainedTokens(torch.tensor([1, 1, 0, 1, 1, 1]), torch.tensor([2, 4]))
        >>> [places.tolist() for places in tokens.backwards()]  # rows [0, 1] and [2, 3, 4]
        [[4], [3, 1], [2, 0]]
        """
        longest_first = self.lengths.argsort(descending=True, stable=True)
        starts = (self.lengths.cumsum(0) - self.lengths)[longest_first]
        ended = self.lengths.bincount().cumsum(0)  # rows of at most t tokens
        for time, rows in reversed(list(enumerate((len(starts) - ended[:-1]).tolist()))):
            yield starts[:rows] + time


def whiten(values: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Values (n,) moved to mean 0 and unbiased variance 1: `(x - mean) / sqrt(var + eps)`.

    A single value becomes 0 (its variance is not defined; nothing is raised).
    """
    centred = values - values.mean()
    variance = (centred**2).sum() / max(len(values) - 1, 1)
    return centred * (variance + eps).rsqrt()
