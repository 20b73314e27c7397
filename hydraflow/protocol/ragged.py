"""Ragged columns: rows of different lengths without padding, as torch jagged tensors (the ragged dimension is
dimension 1).

In: flat values and row lengths, or rows. Out: a tensor that a TensorDict holds as a leaf, and row selection
on it, which torch's own jagged tensors lack. Dense tensors are accepted where a column may be either. Left
out on purpose: gradients through these functions, and more than one ragged dimension.

Legend: B rows, N tokens of all rows together, L length of the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

RowIndex = slice | Sequence[int] | Sequence[bool] | np.ndarray | Tensor
"""How rows are selected: a slice, row numbers (negative ones count from the end), or one bool per row."""

LONG_ROW = 256
"""Mean row length from which copying whole rows (one memcpy each) beats gathering single tokens; measured
crossing at about 200."""


def is_ragged(t: object) -> bool:
    """Whether `t` is a jagged tensor."""
    return isinstance(t, NestedTensor)


def from_parts(values: Tensor, lengths: Tensor) -> Tensor:
    """A ragged column from its tokens, row after row, and the length of each row. Shares memory with
    `values`.

    values: (N, ...); lengths: integers (B,) with sum N. ValueError when they do not add up.

    >>> t = from_parts(torch.tensor([7, 8, 9]), torch.tensor([2, 0, 1]))
    >>> [row.tolist() for row in rows(t)]
    [[7, 8], [], [9]]
    """
    lengths = lengths.to(device=values.device, dtype=torch.int64)
    offsets = _offsets(lengths)
    if int(offsets[-1]) != values.shape[0]:
        raise ValueError(
            f"a ragged column with {values.shape[0]} values cannot have row lengths that add up to"
            f" {int(offsets[-1])}"
        )
    # not nested_tensor_from_jagged, which repeats the checks above and takes five times as long
    return NestedTensor(values.detach(), offsets)


def from_rows(row_list: Sequence[Tensor]) -> Tensor:
    """A ragged column from its rows, each (L_i, ...). ValueError for no rows: their dtype is unknown."""
    if len(row_list) == 0:
        raise ValueError(
            "from_rows needs at least one row; for an empty column use from_parts with empty values of the"
            " right dtype"
        )
    sizes = torch.tensor([len(row) for row in row_list], dtype=torch.int64)
    return from_parts(torch.cat(list(row_list)), sizes)


def parts(t: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens (N, ...), contiguous and only those in use, and the row lengths int64 (B,). No copy unless
    `t` is a view with holes."""
    assert is_ragged(t), f"expected a ragged column, got a dense tensor of shape {tuple(t.shape)}"
    values, offsets, used = _inner(t)
    if used is not None:
        return values.index_select(0, _positions(offsets[:-1], used)), used.to(torch.int64)
    row_lengths = offsets.diff()
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != values.shape[0]:
        values = values[first:last]
    return values.contiguous(), row_lengths


def ragged_dimension(t: Tensor) -> int:
    """The dimension in which the rows of a jagged tensor differ; 1 in a ragged column."""
    assert isinstance(t, NestedTensor)
    return int(t._ragged_idx)


def n_rows(t: Tensor) -> int:
    """Rows of a ragged column; `len` takes ten times as long."""
    return int(_inner(t)[1].shape[0]) - 1


def lengths(t: Tensor) -> Tensor:
    """Row lengths, int64 (B,)."""
    _, offsets, used = _inner(t)
    return offsets.diff() if used is None else used.to(torch.int64)


def rows(t: Tensor) -> list[Tensor]:
    """The rows as views: (L_i, ...) of a ragged column, (...) of a dense one."""
    if not is_ragged(t):
        return list(t.unbind(0))
    values, row_lengths = parts(t)
    return list(values.split(row_lengths.tolist()))


def as_index(index: RowIndex, n_rows: int) -> np.ndarray:
    """Row numbers int64 (K,), each in [0, n_rows). IndexError for a row that does not exist, naming it.

    >>> [as_index(index, 3).tolist() for index in ([True, False, True], [-1, 0], slice(1, None))]
    [[0, 2], [2, 0], [1, 2]]
    """
    if isinstance(index, slice):
        # for a step of 2**63 numpy chooses another dtype
        return np.arange(*index.indices(n_rows)).astype(np.int64, copy=False)
    array = np.asarray(index.detach().cpu().numpy() if isinstance(index, Tensor) else index)
    if array.ndim != 1:
        raise IndexError(f"rows are selected by a one-dimensional index, not by one of shape {array.shape}")
    if array.dtype == bool:
        if len(array) != n_rows:
            raise IndexError(f"a mask of {len(array)} values cannot select from {n_rows} rows")
        return np.flatnonzero(array)
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise IndexError(f"rows are selected by integers or bools, not by {array.dtype}")
    array = array.astype(np.int64, copy=False)
    low, high = int(array.min()), int(array.max())
    if low < -n_rows or high >= n_rows:
        raise IndexError(f"row {high if high >= n_rows else low} does not exist in a batch of {n_rows} rows")
    return np.where(array < 0, array + n_rows, array) if low < 0 else array


def take(t: Tensor, index: RowIndex) -> Tensor:
    """The selected rows of a dense or ragged column, in the order of `index`. A slice with step 1 gives a
    view, anything else a copy."""
    if isinstance(index, slice) and index.step in (None, 1):
        return _take_range(t, *index.indices(len(t))[:2])
    numbers = torch.from_numpy(as_index(index, len(t))).to(t.device)
    if not is_ragged(t):
        return t.detach().index_select(0, numbers)
    values, row_lengths = parts(t)
    if values.shape[0] >= LONG_ROW * len(row_lengths):
        all_rows = values.split(row_lengths.tolist())
        chosen = [all_rows[i] for i in numbers.tolist()]
        return from_parts(torch.cat(chosen) if chosen else values[:0].clone(), row_lengths[numbers])
    places, offsets = positions(row_lengths, numbers)
    return NestedTensor(values.index_select(0, places), offsets)


def positions(row_lengths: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The positions of the tokens of the rows `numbers` among the tokens of all rows, and the offsets
    (len(numbers) + 1,) of those rows.

    >>> [part.tolist() for part in positions(torch.tensor([2, 1]), torch.tensor([1, 0]))]
    [[2, 0, 1], [0, 1, 3]]
    """
    starts, picked = _offsets(row_lengths)[:-1][numbers], row_lengths[numbers]
    return _positions(starts, picked), _offsets(picked)


def concat(columns: Sequence[Tensor]) -> Tensor:
    """Rows of several columns one after the other. ValueError when they mix dense and ragged, dtypes, or
    shapes of a row."""
    kinds = sorted({describe(c) for c in columns})
    if len(kinds) != 1:
        given = " and ".join(kinds) or "none given"
        raise ValueError(f"columns of different kinds cannot be joined: {given}")
    if not is_ragged(columns[0]):
        return torch.cat([c.detach() for c in columns])
    values, row_lengths = zip(*(parts(c) for c in columns), strict=True)
    return from_parts(torch.cat(values), torch.cat(row_lengths))


def describe(t: Tensor) -> str:
    """What all parts of one column share: kind, dtype and the shape of a row."""
    dtype = str(t.dtype).removeprefix("torch.")
    return f"ragged {dtype} {tuple(t.shape[2:])}" if is_ragged(t) else f"dense {dtype} {tuple(t.shape[1:])}"


def to_padded(t: Tensor, length: int | None = None, value: float = 0) -> Tensor:
    """Right-padded (B, L, ...), L = `length` or the longest row. ValueError when a row is longer than
    `length`.

    >>> to_padded(from_rows([torch.tensor([1, 2]), torch.tensor([3])]), length=3, value=-1).tolist()
    [[1, 2, -1], [3, -1, -1]]
    """
    values, row_lengths = parts(t)
    longest = int(row_lengths.max()) if len(row_lengths) else 0
    length = longest if length is None else length
    if longest > length:
        row = int(row_lengths.argmax())
        raise ValueError(f"row {row} has {longest} tokens and does not fit a padded length of {length}")
    padded = values.new_full((len(row_lengths), length, *values.shape[1:]), value)
    in_row = torch.arange(length, device=row_lengths.device)[None, :] < row_lengths[:, None]  # (B, length)
    padded[in_row] = values
    return padded


def _inner(t: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values, offsets (B + 1,), and lengths (B,) of a view with holes or None. The methods of the same names
    take 20 us each. ValueError for a tensor that is ragged in another dimension than 1."""
    assert isinstance(t, NestedTensor)
    if t._ragged_idx != 1:
        raise ValueError(f"a column may be ragged in dimension 1 only, not in dimension {t._ragged_idx}")
    return t._values.detach(), t._offsets, t._lengths


def _take_range(t: Tensor, start: int, stop: int) -> Tensor:
    stop = max(start, stop)
    if not is_ragged(t):
        return t.detach()[start:stop]
    values, row_lengths = parts(t)
    offsets = _offsets(row_lengths)
    return from_parts(values[int(offsets[start]) : int(offsets[stop])], row_lengths[start:stop])


def _offsets(row_lengths: Tensor) -> Tensor:
    offsets = torch.zeros(len(row_lengths) + 1, dtype=torch.int64, device=row_lengths.device)
    torch.cumsum(row_lengths, 0, out=offsets[1:])
    return offsets


def _positions(starts: Tensor, row_lengths: Tensor) -> Tensor:
    """Positions in the values of the tokens of rows that start at `starts`, (sum of row_lengths,)."""
    shift = starts - (torch.cumsum(row_lengths, 0) - row_lengths)
    positions = torch.repeat_interleave(shift, row_lengths)
    return positions.add_(torch.arange(len(positions), device=positions.device))
