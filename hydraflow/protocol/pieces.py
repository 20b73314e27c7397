"""Columns by reference: the pieces of one column, the selected rows of them, and the arithmetic on row
numbers.

In: references and row indices. Out: which pieces a reader needs, which rows of each, and in what order;
smaller references to send. Columns with the same row index share one array object, so its arithmetic is done
once per operation, and it is pickled once. Left out on purpose: whole batches and reading (`remote`),
and resolving references (`dispatch`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hydraflow.protocol import wire
from hydraflow.protocol.columns import n_rows
from hydraflow.protocol.columns import take as take_rows
from hydraflow.protocol.wire import ColumnData


class ColumnRef(Protocol):
    """A reference to some rows of one column. Hashable; equal references mean the same, constant data."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        ...

    def __hash__(self) -> int: ...


class LocalColumn:
    """A reference that carries its data, equal only to itself. After unpickling the data may be shared
    memory, so treat it as read-only."""

    def __init__(self, data: ColumnData):
        self.data = data
        self.rows = n_rows(data)

    def __reduce__(self) -> tuple[Callable[[wire.EncodedColumn], LocalColumn], tuple[wire.EncodedColumn]]:
        return _unpickle_local, (wire.encode(self.data),)


@dataclass(frozen=True, eq=False)
class Column:
    """One column: its pieces, and for each row of the batch its row in the concatenated pieces."""

    refs: tuple[ColumnRef, ...]
    index: np.ndarray | None = None
    """Integers (B,) into the concatenated pieces; None: all rows in order."""

    def __post_init__(self) -> None:
        assert self.refs, "a column has at least one piece, which gives its type even when it has no rows"

    @property
    def layout(self) -> tuple[int, ...]:
        """Rows of each piece."""
        return tuple(ref.rows for ref in self.refs)

    def __len__(self) -> int:
        return sum(self.layout) if self.index is None else len(self.index)


@dataclass(frozen=True)
class PiecePlan:
    """How a column is read: which pieces, which rows of each, and the order that the batch wants them in."""

    picks: tuple[tuple[int, np.ndarray | None], ...]
    """(number of the piece, its rows int64, or None for all of them in order)."""
    order: np.ndarray | None
    """Row i of the batch is row `order[i]` of the concatenated picks; None: they are in order already."""
    wanted: np.ndarray | None = None
    """Row i of the batch is row `wanted[i]` of the whole picked pieces, end to end; None: all in order."""


def piece_plan(column: Column) -> PiecePlan:
    """Which pieces a column needs and which of their rows; rows are picked piece by piece, in the batch's
    order within each.

    A column without rows still needs one piece, which gives its type.

    >>> a, b = LocalColumn(np.arange(3)), LocalColumn(np.arange(2))
    >>> plan = piece_plan(Column((a, b), np.array([4, 1, 3])))
    >>> [(number, local.tolist()) for number, local in plan.picks], plan.order.tolist()
    ([(0, [1]), (1, [1, 0])], [1, 0, 2])
    """
    if len(column) == 0:
        return PiecePlan(((0, np.zeros(0, dtype=np.int64)),), None)
    if column.index is None:
        return PiecePlan(tuple((number, None) for number, rows in enumerate(column.layout) if rows), None)
    ends = np.cumsum(column.layout)
    index = column.index.astype(np.int64, copy=False)
    piece = np.searchsorted(ends, index, side="right")
    by_piece = np.argsort(piece, kind="stable")
    counts = np.bincount(piece, minlength=len(column.refs))
    used = np.flatnonzero(counts)
    groups = np.split(index[by_piece], np.cumsum(counts[used])[:-1])
    starts = ends - np.asarray(column.layout)
    grouped = zip(used, groups, strict=True)
    picks = tuple((int(n), unless_whole(rows - starts[n], column.layout[n])) for n, rows in grouped)
    # for each piece, the rows of unused pieces before it
    skipped = starts - (np.cumsum(np.where(counts, column.layout, 0)) - np.where(counts, column.layout, 0))
    wanted = index - skipped[piece]
    order = None if is_range(by_piece) else np.argsort(by_piece)
    return PiecePlan(picks, order, unless_whole(wanted, int((ends - starts)[used].sum())))


class PiecePlanCache:
    """`piece_plan`, computed once for columns with the same layout and the same index object."""

    def __init__(self) -> None:
        self._plans: dict[object, PiecePlan] = {}

    @staticmethod
    def key(column: Column) -> tuple[tuple[int, ...], int]:
        """Cache key: equal for columns that share a plan."""
        return column.layout, id(column.index)

    def __call__(self, column: Column) -> PiecePlan:
        key = self.key(column)
        if key not in self._plans:
            self._plans[key] = piece_plan(column)
        return self._plans[key]


def is_range(rows: np.ndarray) -> bool:
    """Whether the row numbers are 0, 1, 2 and so on."""
    return bool((rows == np.arange(len(rows))).all())


def as_slice(rows: np.ndarray) -> np.ndarray | slice:
    """Row numbers that follow each other as a slice, which is taken without a copy.

    >>> as_slice(np.array([3, 4, 5])), as_slice(np.array([3, 5])).tolist()
    (slice(3, 6, None), [3, 5])
    """
    first = int(rows[0]) if len(rows) else 0
    return slice(first, first + len(rows)) if is_range(rows - first) else rows


def unless_whole(rows: np.ndarray, available: int) -> np.ndarray | None:
    """The row numbers; None if they are all the available rows in order."""
    return None if len(rows) == available and is_range(rows) else rows


def concat_columns(parts: Sequence[Column], memo: dict[object, np.ndarray | None]) -> Column:
    """The rows of all parts. Pieces that parts share are kept once, so joining the chunks of a batch gives
    its own pieces back. `memo` is shared by a batch's columns, so that they keep sharing an index."""
    places: dict[ColumnRef, int] = {}
    for part in parts:
        for ref in part.refs:
            places.setdefault(ref, len(places))
    refs = tuple(places)
    numbers = tuple(tuple(places[ref] for ref in part.refs) for part in parts)
    layout = tuple(ref.rows for ref in refs)
    key = (layout, numbers, tuple(id(part.index) for part in parts))
    if key not in memo:
        starts = np.cumsum(layout) - np.asarray(layout, dtype=np.int64)
        memo[key] = _joined_index(parts, numbers, starts, sum(layout))
    return Column(refs, memo[key])


def _joined_index(
    parts: Sequence[Column], numbers: Sequence[tuple[int, ...]], starts: np.ndarray, total: int
) -> np.ndarray | None:
    """Index of all rows into the joined pieces. `numbers`: for each part, where its pieces are among the
    joined ones; `starts`: the first row of each joined piece; `total`: their rows."""
    moved = []
    for part, places in zip(parts, numbers, strict=True):
        index = np.arange(len(part)) if part.index is None else part.index.astype(np.int64, copy=False)
        ends = np.cumsum(part.layout)
        piece = np.searchsorted(ends, index, side="right")
        shift = starts[list(places)] - (ends - np.asarray(part.layout))
        moved.append(index + shift[piece])
    return unless_whole(np.concatenate(moved), total)


Localised = tuple[list[np.ndarray | None], np.ndarray | None]
"""For one plan: the rows that each local piece keeps (None: all), and the new index."""


def localise(column: Column, plans: PiecePlanCache, memo: dict[object, Localised]) -> Column:
    """The same rows without unused pieces and unused rows of local pieces; consecutive rows are cut as a
    view. `memo` is shared by a batch's columns."""
    plan = plans(column)
    refs = [column.refs[number] for number, _ in plan.picks]
    is_local = tuple(isinstance(ref, LocalColumn) for ref in refs)
    key = (plans.key(column), is_local)
    if key not in memo:
        memo[key] = _shrink(plan, is_local, [ref.rows for ref in refs])
    kept_rows, index = memo[key]
    cut = [
        LocalColumn(take_rows(ref.data, as_slice(kept)))
        if isinstance(ref, LocalColumn) and kept is not None
        else ref
        for ref, kept in zip(refs, kept_rows, strict=True)
    ]
    return Column(tuple(cut), index)


def _shrink(plan: PiecePlan, is_local: Sequence[bool], layout: Sequence[int]) -> Localised:
    """Local pieces keep each wanted row once. The index gets the smallest integer dtype, often two bytes per
    row instead of eight."""
    kept: list[np.ndarray | None] = []
    rows: list[np.ndarray] = []
    total = 0
    for local, here, size in zip((local for _, local in plan.picks), is_local, layout, strict=True):
        keep, wanted = _distinct(local) if here and local is not None else (None, local)
        kept.append(keep)
        rows.append(total + (np.arange(size) if wanted is None else wanted))
        total += size if keep is None else len(keep)
    joined = np.concatenate(rows)
    index = unless_whole(joined if plan.order is None else joined[plan.order], total)
    return kept, (None if index is None else index.astype(np.min_scalar_type(total)))


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row number once, in the given order if none repeats, and where each of `rows` is in them."""
    distinct, places = np.unique(rows, return_inverse=True)
    return (rows, np.arange(len(rows))) if len(distinct) == len(rows) else (distinct, places)


def _unpickle_local(encoded: wire.EncodedColumn) -> LocalColumn:
    return LocalColumn(wire.decode(encoded, copy=False))  # `materialise` copies what it hands out
