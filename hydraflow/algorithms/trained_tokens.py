"""The trained tokens of ragged rows: selected, discounted along each row, whitened, and scattered back.

In: flat columns (N,), the tokens of all rows one row after the other; their mask, and the lengths of the
rows. Out: the same columns with the trained tokens alone (n,), and sums over them. Left out on purpose:
making flat columns (`protocol/ragged.py`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BLOCK = 64
"""Tokens of a row that one matrix product discounts."""


def row_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums (B,) float64 over the rows of a flat column (N,); 0 for a row without tokens.

    >>> row_sums(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([2, 0, 1])).tolist()
    [3.0, 0.0, 5.0]
    """
    rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)  # (N,)
    return torch.zeros(len(lengths), dtype=torch.float64).index_add_(0, rows, values.double())


class TrainedTokens:
    """The tokens of a step whose mask is 1; each row consists of its trained tokens only."""

    def __init__(self, mask: Tensor, lengths: Tensor):
        self._size = len(mask)
        # numpy's flatnonzero on booleans takes half the time of torch's nonzero
        self._places = torch.from_numpy(np.flatnonzero(mask.numpy().astype(bool)))
        """Positions (n,) of the trained tokens among all tokens."""
        ends = torch.searchsorted(self._places, lengths.cumsum(0))
        self.lengths = ends.diff(prepend=ends.new_zeros(1))
        """Trained tokens of each row, (B,)."""

    def of(self, column: Tensor) -> Tensor:
        """The trained tokens (n,) of a column (N,)."""
        return column if len(self._places) == self._size else column.index_select(0, self._places)

    def put_back(self, values: Tensor) -> Tensor:
        """A column (N,) with these trained tokens (n,), and 0 elsewhere."""
        if len(values) == self._size:
            return values
        return values.new_zeros(self._size).scatter_(0, self._places, values)

    def following(self, values: Tensor) -> Tensor:
        """For each trained token the value of the next one in its row, 0 after the last: (n,).

        >>> tokens = TrainedTokens(torch.tensor([1, 1, 0, 1, 1, 1]), torch.tensor([2, 4]))
        >>> tokens.following(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).tolist()  # rows [0, 1] and [2, 3, 4]
        [2.0, 0.0, 4.0, 5.0, 0.0]
        """
        return _following(values, self.lengths)

    def discounted(self, values: Tensor, factor: float | Tensor) -> Tensor:
        """Discounted sums along each row, (n,): `s_t = value_t + factor_t * s_next(t)`. `factor`: a number,
        or (n,), that of the step from each token to the next.

        >>> tokens = TrainedTokens(torch.tensor([1, 1, 0, 1, 1, 1]), torch.tensor([2, 4]))
        >>> tokens.discounted(torch.tensor([1.0, 2.0, 3.0, 4.0, 8.0]), 0.5).tolist()
        [2.0, 2.0, 7.0, 8.0, 8.0]
        >>> factors = torch.tensor([0.0, 0.0, 0.5, 0.25, 0.0])
        >>> tokens.discounted(torch.tensor([1.0, 2.0, 3.0, 4.0, 8.0]), factors).tolist()
        [1.0, 2.0, 6.0, 6.0, 8.0]
        """
        if isinstance(factor, Tensor):
            return _discounted_by_token(values, self.lengths, factor)
        return _discounted(values, self.lengths, factor)


def _following(values: Tensor, lengths: Tensor) -> Tensor:
    """The value after each in its row, 0 after the last. lengths: of the rows of `values` (n,)."""
    after = _ahead(values, 1)
    after[lengths.cumsum(0)[lengths > 0] - 1] = 0
    return after


def _discounted(values: Tensor, lengths: Tensor, factor: float) -> Tensor:
    """As `TrainedTokens.discounted`, without a loop over time: a matrix product within each block of a row,
    then the same function on the blocks' first values."""
    longest = int(lengths.max()) if len(lengths) else 0
    if longest <= 1:
        return values
    size = min(BLOCK, longest)
    blocks = -(-lengths // size)  # (B,)
    places, total = None, int(blocks.sum()) * size
    if total != len(values):  # rows that do not fill their last block
        places = _with_gaps(lengths, blocks * size - lengths)
        values = values.new_zeros(total).scatter_(0, places, values)
    powers = (factor ** torch.arange(size + 1, dtype=torch.float64)).to(values.dtype)
    steps = torch.arange(size)
    apart = steps[:, None] - steps[None, :]  # later minus earlier
    inside = values.view(-1, size) @ torch.where(apart >= 0, powers[apart.clamp(min=0)], 0)
    firsts = _discounted(inside[:, 0], blocks, factor**size)
    whole = inside.addcmul_(_following(firsts, blocks)[:, None], powers[size - steps]).view(-1)
    return whole if places is None else whole.index_select(0, places)


def _with_gaps(lengths: Tensor, gaps: Tensor) -> Tensor:
    """Positions (n,) of the tokens when each row is followed by a gap.

    >>> _with_gaps(torch.tensor([2, 0, 3]), torch.tensor([1, 0, 5])).tolist()
    [0, 1, 3, 4, 5]
    """
    steps = torch.ones(int(lengths.sum()) + 1, dtype=torch.int64)  # from the previous position to each
    steps[0] = 0
    return steps.index_add_(0, lengths.cumsum(0), gaps).cumsum(0)[:-1]


def _discounted_by_token(values: Tensor, lengths: Tensor, factors: Tensor) -> Tensor:
    """As `TrainedTokens.discounted` with a factor per token: sums over 1, 2, 4, ... tokens, each made of two
    of the previous (Hillis and Steele 1986, https://doi.org/10.1145/7902.7903). In float64, because each
    product doubles the relative error of its factors."""
    dtype, values = values.dtype, values.double()
    power, reach = factors.double(), 1
    after = lengths.cumsum(0).repeat_interleave(lengths) - torch.arange(len(values)) - 1  # later in the row
    while reach < int(lengths.max() if len(lengths) else 0):
        values = values + power * _ahead(values, reach).masked_fill(after < reach, 0)
        power, reach = power * _ahead(power, reach), 2 * reach
    return values.to(dtype)


def _ahead(values: Tensor, reach: int) -> Tensor:
    """Values shifted left by `reach` positions, 0 beyond the end."""
    return torch.cat([values[reach:], values.new_zeros(min(reach, len(values)))])


def whiten(values: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Values (n,) shifted to mean 0 and scaled to unbiased variance 1: `(x - mean) / sqrt(var + eps)`.

    A single value becomes 0, although its variance is undefined, and so do equal values.
    """
    centred = values - values[:1]  # the mean of equal values would be off by rounding
    centred = centred - centred.mean()
    variance = (centred**2).sum() / max(len(values) - 1, 1)
    return centred * (variance + eps).rsqrt()
