"""Selects rows of several ragged pieces in one pass over their tokens.

In: the pieces of a column and the wanted row numbers of their concatenation. Out: one ragged column. The
columns of a batch mostly have the same row lengths (responses, masks, log-probabilities), so their token
positions are computed once. Left out on purpose: pieces with few wanted rows, and long rows,
which are copied piece by piece (`remote`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

from hydraflow.protocol import ragged

FEW_ROWS = 4
"""Concatenating the pieces pays off if at least one row in this many is wanted."""


class Gather:
    """Picks the same rows from one column after another.

    >>> pick = Gather(torch.tensor([2, 0]))
    >>> first = ragged.from_rows([torch.tensor([1, 2])])
    >>> second = ragged.from_rows([torch.tensor([3]), torch.tensor([4, 5, 6])])
    >>> column = pick([first, second])
    >>> [row.tolist() for row in ragged.rows(column)]
    [[4, 5, 6], [1, 2]]
    """

    def __init__(self, wanted: Tensor):
        self.wanted = wanted
        """Row numbers int64 (B,) into the concatenated pieces."""
        self._lengths: Tensor | None = None
        self._positions = self._offsets = wanted
        """Of the tokens of the wanted rows, for pieces with `_lengths`; meaningless before the first call."""

    def suits(self, pieces: Sequence[object]) -> bool:
        """Whether these are ragged pieces of one dtype with short rows, of which enough are wanted."""
        kept = [piece for piece in pieces if isinstance(piece, NestedTensor)]
        kinds = {(piece._values.dtype, piece._values.shape[1:]) for piece in kept}
        if len(kept) < len(pieces) or len(kinds) > 1:
            return False
        rows = sum(len(piece._offsets) - 1 for piece in kept)
        tokens = sum(piece._values.shape[0] for piece in kept)
        return tokens < ragged.LONG_ROW * rows and rows <= FEW_ROWS * len(self.wanted)

    def __call__(self, pieces: Sequence[Tensor]) -> Tensor:
        """The wanted rows, as a copy."""
        split = [ragged.parts(piece) for piece in pieces]
        parts = zip(*split, strict=True)
        values, lengths = (torch.cat(part) if len(split) > 1 else part[0] for part in parts)
        if self._lengths is None or not torch.equal(lengths, self._lengths):
            self._lengths = lengths
            self._positions, self._offsets = ragged.positions(lengths, self.wanted)
        return NestedTensor(values.index_select(0, self._positions), self._offsets)
