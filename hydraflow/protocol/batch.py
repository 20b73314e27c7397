"""DataProto: a batch of rows, with verl's operations and semantics.

In: tensors (dense, or ragged where rows differ in length), objects per row, and facts about the whole batch.
Out: new batches; operations shared with `RemoteBatch` are in `rows`, those that only verl's users call in
`verl_methods`.
Left out on purpose: padding on the wire, verl's automatic padding, and saving to disk.
Column names are in `fields`; what the controller holds instead of a DataProto is in `remote`.

Legend: B rows. Methods that fail on the user's data raise ValueError or KeyError that name the column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from hydraflow.protocol import columns, ragged, wire
from hydraflow.protocol.ragged import RowIndex
from hydraflow.protocol.rows import check_rows, concat_facts
from hydraflow.protocol.verl_methods import VerlMethods
from hydraflow.protocol.wire import ColumnData


@dataclass(eq=False)
class DataProtoItem:
    """One row of a batch: tensors without the row dimension, objects as they are."""

    batch: TensorDict | None
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


@dataclass(eq=False)
class DataProto(VerlMethods):
    """Columns of B rows each, and facts about the whole batch.

    >>> data = DataProto.from_dict({"length": torch.tensor([3, 1])}, {"uid": ["a", "b"]}, {"step": 7})
    >>> data.repeat(2).get("length").tolist(), data[[1]].get("uid").tolist()
    ([3, 3, 1, 1], ['b'])
    """

    batch: TensorDict | None = None
    """Tensor columns: dense (B, ...) or ragged (B, j, ...)."""
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    """Object columns: object arrays (B,) or (B, ...). They are sent as JSON."""
    meta_info: dict[str, Any] = field(default_factory=dict)
    """Plain values about the batch; `concat` merges `metrics`, everything else must agree."""

    def __post_init__(self) -> None:
        objects = self.non_tensor_batch.items()
        self.non_tensor_batch = {key: columns.object_column(value, key) for key, value in objects}
        for key, value in {} if self.batch is None else self.batch.items():
            columns.tensor_column(value, key)
        self.check()

    def check(self) -> None:
        """ValueError when columns differ in their number of rows (naming each), or one name is used twice."""
        check_rows(dict(self.items()), None if self.batch is None else len(self))
        twice = self.non_tensor_batch.keys() & self._columns().keys()
        if twice:
            raise ValueError(f"columns {sorted(twice)} are both tensors and objects")

    # Construction

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> Self:
        """A batch from tensors (B, ...) and objects (B items). ValueError when the numbers of rows differ."""
        given = {key: columns.tensor_column(value, key) for key, value in (tensors or {}).items()}
        objects = {key: columns.object_column(value, key) for key, value in (non_tensors or {}).items()}
        check_rows({**given, **objects})
        batch = TensorDict(given, batch_size=[columns.n_rows(next(iter(given.values())))]) if given else None
        return cls(batch, objects, dict(meta_info or {}))

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: dict[str, Any] | None = None) -> Self:
        """A batch from one dict: tensors become tensor columns, arrays and lists object columns."""
        tensors = {key: value for key, value in data.items() if isinstance(value, Tensor)}
        objects = {key: value for key, value in data.items() if key not in tensors}
        return cls.from_dict(tensors, objects, meta_info)

    # Access

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(column) for column in self.non_tensor_batch.values()), 0)

    def items(self) -> list[tuple[str, ColumnData]]:
        """All columns with their names, tensors first."""
        return [*self._columns().items(), *self.non_tensor_batch.items()]

    def get(self, key: str) -> Any:
        """The tensor or object array named `key`. KeyError lists the columns."""
        found = dict(self.items())
        if key not in found:
            raise KeyError(f"the batch has no column {key!r}; it has {self.keys()}")
        return found[key]

    def __repr__(self) -> str:
        kinds = [f"{key}: {ragged.describe(value)}" for key, value in self._columns().items()]
        kinds += [f"{key}: objects" for key in self.non_tensor_batch]
        return f"DataProto({len(self)} rows; {', '.join(kinds)}; meta_info: {sorted(self.meta_info)})"

    def __getitem__(self, index: int | RowIndex) -> Any:
        """One row (`DataProtoItem`) for an int, else a batch: slice, row numbers, or one bool per row."""
        if isinstance(index, int | np.integer):
            return self._item(int(index))
        if isinstance(index, slice):
            return self.slice(index.start, index.stop, index.step)
        return self.select_idxs(index)

    def to(self, device: str | torch.device) -> Self:
        """The same batch with its tensors on `device`."""
        columns = {key: column.to(device) for key, column in self._columns().items()}
        return self._like(columns, dict(self.non_tensor_batch), dict(self.meta_info), len(self))

    def with_columns(self, tensors: Mapping[str, Tensor]) -> Self:
        """A copy with these tensor columns added; they replace columns of the same name.

        >>> data = DataProto.from_dict({"length": torch.tensor([3, 1])})
        >>> data.with_columns({"live": torch.tensor([True, False])}).get("live").tolist()
        [True, False]
        """
        return self.from_dict({**self._columns(), **tensors}, self.non_tensor_batch, self.meta_info)

    def flat_columns(self) -> dict[str, Tensor]:
        """The ragged columns, flattened to (tokens of all rows, ...) each."""
        return {name: ragged.parts(one)[0] for name, one in self._columns().items() if ragged.is_ragged(one)}

    # Rows

    def select_idxs(self, index: RowIndex) -> Self:
        """The selected rows, in the order of `index`, copied."""
        numbers = ragged.as_index(index, len(self))
        return self._map(lambda _, column: columns.take(column, numbers), len(numbers))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Rows `start:end:step`; with step 1 the columns are views."""
        first, stop, by = slice(start, end, step).indices(len(self))
        index: RowIndex = slice(first, stop) if by == 1 else np.arange(first, stop, by)
        return self._map(lambda _, column: columns.take(column, index), len(range(first, stop, by)))

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Rows of all batches, one batch after the other. `meta_info["metrics"]` of the parts becomes a dict
        of lists, other facts must agree. ValueError when columns or facts do not agree."""
        if len(data) == 0:
            raise ValueError("concat needs at least one batch")
        parts = [dict(part.items()) for part in data]
        odd = {key for part in parts for key in part.keys() ^ parts[0].keys()}
        if odd:
            raise ValueError(f"concat: columns {sorted(odd)} are not in all of the batches")
        joined = {key: columns.concat([part[key] for part in parts], key) for key in parts[0]}
        rows = None if data[0].batch is None else sum(map(len, data))
        return of_columns(joined, concat_facts([part.meta_info for part in data]), rows)

    # pickles numpy arrays, which protocol 5 keeps out of band; torch's own pickler would copy

    def __reduce__(self) -> tuple[Callable[..., DataProto], tuple[Any, ...]]:
        encoded = {key: wire.encode(column, key) for key, column in self.items()}
        return _unpickle, (encoded, self.meta_info, None if self.batch is None else len(self))

    # Internals

    def _columns(self) -> dict[str, Tensor]:
        if self.batch is None:
            return {}
        return {key: value for key, value in self.batch.items()}  # type: ignore[misc]

    def _objects(self) -> dict[str, np.ndarray]:
        return self.non_tensor_batch

    def _like(
        self, columns: dict[str, Any], objects: dict[str, Any], facts: dict[str, Any], rows: int
    ) -> Self:
        batch = None if self.batch is None else TensorDict(columns, batch_size=[rows])
        return type(self)(batch, objects, facts)

    def _set(self, columns: dict[str, Any], objects: dict[str, np.ndarray], rows: int) -> None:
        # a batch without columns is a TensorDict that holds only the number of rows
        if self.batch is not None or columns or (rows and not objects):
            self.batch = TensorDict(columns, batch_size=[rows])
        self.non_tensor_batch = objects

    def _drop(self, keys: Iterable[str]) -> None:
        for key in keys:
            if key in self.non_tensor_batch:
                del self.non_tensor_batch[key]
            elif self.batch is not None:
                del self.batch[key]

    def _map(self, change: Callable[[str, ColumnData], ColumnData], rows: int) -> Self:
        tensors = {key: change(key, value) for key, value in self._columns().items()}
        objects = {key: change(key, value) for key, value in self.non_tensor_batch.items()}
        return self._like(tensors, objects, dict(self.meta_info), rows)

    def _item(self, row: int) -> DataProtoItem:
        place = int(ragged.as_index([row], len(self))[0])
        one = self.slice(place, place + 1)
        tensors = {key: ragged.rows(value)[0] for key, value in one._columns().items()}
        objects = {key: column[0] for key, column in one.non_tensor_batch.items()}
        batch = None if self.batch is None else TensorDict(tensors, batch_size=[])
        return DataProtoItem(batch, objects, dict(self.meta_info))


def of_columns(columns: Mapping[str, ColumnData], facts: dict[str, Any], rows: int | None) -> DataProto:
    """A batch of tensor and object columns; `rows` None: without a TensorDict."""
    tensors = {key: column for key, column in columns.items() if isinstance(column, Tensor)}
    objects = {key: column for key, column in columns.items() if isinstance(column, np.ndarray)}
    return DataProto(None if rows is None else TensorDict(tensors, batch_size=[rows]), objects, facts)


def _unpickle(
    encoded: Mapping[str, wire.EncodedColumn], meta_info: dict[str, Any], rows: int | None
) -> DataProto:
    return of_columns({key: wire.decode(column) for key, column in encoded.items()}, meta_info, rows)
