"""RemoteBatch: the controller's view of a batch, with references to columns in place of tensors.

In: references to shards of columns, which stay where they were created, and small objects per row. Out: new
RemoteBatches after row operations, none of which reads a tensor; in the worker, a `DataProto`. `dispatch`
implements `ColumnRef` with references into Ray's object store; `LocalColumn` carries its data itself. Every
method keeps columns sharing their row index (`pieces.py`). Left out on purpose: anything that computes on
tensors, and fetching, which the caller of `materialise` provides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from hydraflow.protocol import ragged, wire
from hydraflow.protocol.batch import DataProto, of_columns
from hydraflow.protocol.columns import concat as join_rows
from hydraflow.protocol.columns import n_rows, object_column
from hydraflow.protocol.columns import take as take_rows
from hydraflow.protocol.gather import Gather
from hydraflow.protocol.pieces import (
    Column,
    ColumnRef,
    LocalColumn,
    Localised,
    PiecePlan,
    PiecePlanCache,
    as_slice,
    concat_columns,
    localise,
    unless_whole,
)
from hydraflow.protocol.ragged import RowIndex
from hydraflow.protocol.rows import Rows, check_rows, concat_facts
from hydraflow.protocol.wire import ColumnData


@dataclass(eq=False)
class RemoteBatch(Rows):
    """Columns by reference, objects by value, facts about the batch. Row operations only compute on row
    numbers.

    >>> import torch
    >>> batch = RemoteBatch.from_local(DataProto.from_dict({"x": torch.arange(4)}))
    >>> part = batch.select_idxs([3, 0]).repeat(2).chunk(2)[0]
    >>> materialise(part, fetch=lambda refs: []).get("x").tolist()
    [3, 3]
    """

    columns: dict[str, Column] = field(default_factory=dict)
    objects: dict[str, np.ndarray] = field(default_factory=dict)
    """Object arrays (B, ...) that the controller itself holds."""
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.objects = {key: object_column(value, key) for key, value in self.objects.items()}
        check_rows({**self.columns, **self.objects})
        twice = self.columns.keys() & self.objects.keys()
        if twice:
            raise ValueError(f"columns {sorted(twice)} are both references and objects")

    @classmethod
    def from_local(cls, data: DataProto) -> Self:
        """A batch whose tensors are `LocalColumn`s, sharing memory with `data`."""
        local = {key: Column((LocalColumn(value),)) for key, value in data._columns().items()}
        return cls(local, dict(data.non_tensor_batch), dict(data.meta_info))

    # Access

    def __len__(self) -> int:
        for column in self.columns.values():
            return len(column)
        return next((len(value) for value in self.objects.values()), 0)

    def __repr__(self) -> str:
        kinds = [f"{key}: {len(column.refs)} pieces" for key, column in self.columns.items()]
        kinds += [f"{key}: objects" for key in self.objects]
        return f"RemoteBatch({len(self)} rows; {', '.join(kinds)}; meta_info: {sorted(self.meta_info)})"

    # Rows

    def __getitem__(self, index: RowIndex) -> RemoteBatch:
        """The selected rows: slice, row numbers, or one bool per row."""
        return self.select_idxs(index)

    def select_idxs(self, index: RowIndex) -> Self:
        """The selected rows, in the order of `index`."""
        chosen = ragged.as_index(index, len(self))
        indices = {id(column.index): column.index for column in self.columns.values()}
        whole = unless_whole(chosen, len(self))
        moved = {key: whole if index is None else index[chosen] for key, index in indices.items()}
        picked = {key: Column(column.refs, moved[id(column.index)]) for key, column in self.columns.items()}
        objects = {key: value[chosen] for key, value in self.objects.items()}
        return self._like(picked, objects, dict(self.meta_info), len(chosen))

    def pad_to_divisor(self, divisor: int) -> tuple[Self, int]:
        """Rows repeated from the start until `divisor` divides their number, and how many were added."""
        pad = -len(self) % divisor
        return (self.select_idxs(np.arange(len(self) + pad) % len(self)), pad) if pad else (self, 0)

    @staticmethod
    def concat(data: Sequence[RemoteBatch]) -> RemoteBatch:
        """Rows of all batches, one batch after the other; facts as in `DataProto.concat`. ValueError when
        columns or facts differ."""
        if len(data) == 0:
            raise ValueError("concat needs at least one batch")
        keys = set(data[0].keys())
        for part in data:
            if set(part.keys()) == keys and (mixed := part.columns.keys() ^ data[0].columns.keys()):
                raise ValueError(
                    f"columns {sorted(mixed)} are references in one batch and objects in another"
                )
            if set(part.keys()) != keys:
                raise ValueError(
                    f"batches to concatenate differ in their columns: {sorted(keys)} and"
                    f" {sorted(part.keys())}"
                )
        memo: dict[object, np.ndarray | None] = {}
        joined = {key: concat_columns([part.columns[key] for part in data], memo) for key in data[0].columns}
        objects = {key: np.concatenate([part.objects[key] for part in data]) for key in data[0].objects}
        return RemoteBatch(joined, objects, concat_facts([part.meta_info for part in data]))

    def union(self, other: Self | DataProto) -> Self:
        """See `Rows`. A column that both have must be the same reference: the controller does not read
        tensors to compare them."""
        return super().union(self.from_local(other) if isinstance(other, DataProto) else other)

    # Reading

    def localised(self) -> RemoteBatch:
        """The same rows with only what is needed to read them: unused pieces dropped, local columns cut to
        their rows, indices small. This is what is sent to a worker."""
        plans = PiecePlanCache()
        memo: dict[object, Localised] = {}
        smaller = {key: localise(column, plans, memo) for key, column in self.columns.items()}
        return RemoteBatch(smaller, self.objects, self.meta_info)

    # Internals

    def _columns(self) -> dict[str, Column]:
        return self.columns

    def _objects(self) -> dict[str, np.ndarray]:
        return self.objects

    def _like(
        self, columns: dict[str, Any], objects: dict[str, Any], facts: dict[str, Any], rows: int
    ) -> Self:
        return type(self)(columns, objects, facts)

    def _set(self, columns: dict[str, Any], objects: dict[str, np.ndarray], rows: int) -> None:
        self.columns, self.objects = columns, objects

    def _drop(self, keys: Iterable[str]) -> None:
        for key in keys:
            del (self.objects if key in self.objects else self.columns)[key]

    def _difference(self, mine: Any, theirs: Any) -> str | None:
        if isinstance(mine, np.ndarray) and isinstance(theirs, np.ndarray):
            return super()._difference(mine, theirs)
        if isinstance(mine, np.ndarray) or isinstance(theirs, np.ndarray):
            return "is a reference in one batch and objects in the other"
        if mine.refs == theirs.refs and np.array_equal(mine.index, theirs.index):
            return None
        return "is in both batches, but not as the same reference; pop or rename one of the two first"

    def __reduce__(self) -> tuple[Callable[..., RemoteBatch], tuple[Any, ...]]:
        objects = {key: wire.encode(value, key) for key, value in self.objects.items()}
        return _unpickle_batch, (self.columns, objects, self.meta_info)


def materialise(
    batch: RemoteBatch,
    fetch: Callable[[list[ColumnRef]], Sequence[ColumnData]],
    keys: Iterable[str] | None = None,
    *,
    copy: bool = True,
) -> DataProto:
    """The batch as data. `fetch` is called at most once, with every reference that is needed, and returns
    their data in that order.

    keys: columns and objects to read; None: all. KeyError for a name that is not there. With `copy=False`
    tensors may be views of what `fetch` returned, which may be shared memory: only read them.
    """
    wanted = batch if keys is None else _subset(batch, keys)
    plans = PiecePlanCache()
    needed = {
        column.refs[number]: None for column in wanted.columns.values() for number, _ in plans(column).picks
    }
    data: dict[ColumnRef, ColumnData] = {ref: ref.data for ref in needed if isinstance(ref, LocalColumn)}
    to_fetch = [ref for ref in needed if ref not in data]
    if to_fetch:
        data.update(zip(to_fetch, fetch(to_fetch), strict=True))
    gathers: dict[int, Gather] = {}
    read = {
        key: _read(column, plans(column), data, key, copy, gathers) for key, column in wanted.columns.items()
    }
    rows = len(wanted) if any(isinstance(value, Tensor) for value in read.values()) else None
    return of_columns({**read, **wanted.objects}, dict(wanted.meta_info), rows)


def _read(
    column: Column,
    plan: PiecePlan,
    data: Mapping[ColumnRef, ColumnData],
    name: str,
    copy: bool,
    gathers: dict[int, Gather],
) -> ColumnData:
    """One column as data. `gathers`: by the plan's identity, for all columns that share it."""
    # rows scattered over the pieces: gathered token by token if that is faster than row by row
    if plan.wanted is not None and not isinstance(as_slice(plan.wanted), slice):
        gather = gathers.setdefault(id(plan), Gather(torch.from_numpy(plan.wanted)))
        pieces = [_checked(column.refs[number], data, name) for number, _ in plan.picks]
        if gather.suits(pieces):
            return gather([piece for piece in pieces if isinstance(piece, Tensor)])
    taken = [_wanted(column.refs[number], local, data, name) for number, local in plan.picks]
    joined = taken[0][0] if len(taken) == 1 else join_rows([rows for rows, _ in taken], name)
    if plan.order is not None:
        return take_rows(joined, plan.order)
    is_view = len(taken) == 1 and taken[0][1]
    return _copied(joined) if copy and is_view else joined


def _wanted(
    ref: ColumnRef, local: np.ndarray | None, data: Mapping[ColumnRef, ColumnData], name: str
) -> tuple[ColumnData, bool]:
    """The wanted rows of one piece, and whether they share memory with it."""
    piece = _checked(ref, data, name)
    if local is None:
        return piece, True
    index = as_slice(local)
    return take_rows(piece, index), isinstance(index, slice)


def _checked(ref: ColumnRef, data: Mapping[ColumnRef, ColumnData], name: str) -> ColumnData:
    piece = data[ref]
    if (rows := n_rows(piece)) != ref.rows:
        raise ValueError(f"column {name!r}: a piece should have {ref.rows} rows, but has {rows}")
    return piece


def _copied(column: ColumnData) -> ColumnData:
    if isinstance(column, np.ndarray):
        return column.copy()
    if not ragged.is_ragged(column):
        return column.clone()
    values, lengths = ragged.parts(column)
    return ragged.from_parts(values.clone(), lengths)


def _subset(batch: RemoteBatch, keys: Iterable[str]) -> RemoteBatch:
    names = list(keys)
    missing = [name for name in names if name not in batch.columns and name not in batch.objects]
    if missing:
        raise KeyError(f"the batch has no columns {missing}; it has {batch.keys()}")
    columns = [name for name in names if name in batch.columns]
    return batch.select(columns, [name for name in names if name in batch.objects])


def _unpickle_batch(
    cols: dict[str, Column], objects: dict[str, wire.EncodedColumn], meta_info: dict[str, Any]
) -> RemoteBatch:
    arrays = {key: wire.decode(value) for key, value in objects.items()}
    return RemoteBatch(cols, arrays, meta_info)  # type: ignore[arg-type]
