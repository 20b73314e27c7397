"""DataProto: a batch of rows that travels through the trainer, with verl's operations and semantics.

In: tensors (dense, or ragged where rows differ in length), objects per row, and facts about the whole batch.
Out: new batches; only `union`, `pop`, `rename` and `reorder` change the batch itself, as in verl.
Left out on purpose: padding on the wire, verl's automatic padding, and saving to disk.
Column names are in `fields`; what the controller holds instead of a DataProto is in `remote`.

Legend: B rows. Methods that fail on the user's data raise ValueError or KeyError that name the column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from hydraflow.protocol import columns, ragged, wire
from hydraflow.protocol.ragged import RowIndex
from hydraflow.protocol.wire import ColumnData


@dataclass(eq=False)
class DataProtoItem:
    """One row of a batch: tensors without the row dimension, objects as they are."""

    batch: TensorDict | None
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


@dataclass(eq=False)
class DataProto:
    """Columns of B rows each, and facts about the whole batch.

    >>> data = DataProto.from_dict({"length": torch.tensor([3, 1])}, {"uid": ["a", "b"]}, {"step": 7})
    >>> data.repeat(2).get("length").tolist(), data[[1]].get("uid").tolist()
    ([3, 3, 1, 1], ['b'])
    """

    batch: TensorDict | None = None
    """Tensor columns: dense (B, ...) or ragged (B, j, ...)."""
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    """Object columns: object arrays (B,) or (B, ...). They travel as JSON."""
    meta_info: dict[str, Any] = field(default_factory=dict)
    """Plain facts about the batch; `metrics` in it is merged by `concat`, all else must agree."""

    def __post_init__(self) -> None:
        self.non_tensor_batch = {
            key: columns.object_column(value, key) for key, value in self.non_tensor_batch.items()
        }
        for key, value in {} if self.batch is None else self.batch.items():
            columns.tensor_column(value, key)
        self.check()

    def check(self) -> None:
        """ValueError when columns differ in their number of rows (naming each), or one name is used twice."""
        check_rows(dict(self.items()), None if self.batch is None else len(self))
        twice = self.non_tensor_batch.keys() & self._tensors().keys()
        if twice:
            raise ValueError(f"columns {sorted(twice)} are both tensors and objects")

    # Making batches

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> DataProto:
        """A batch from tensors (B, ...) and objects (arrays or lists of B items). ValueError when the rows do
        not agree."""
        given = {key: columns.tensor_column(value, key) for key, value in (tensors or {}).items()}
        objects = {key: columns.object_column(value, key) for key, value in (non_tensors or {}).items()}
        check_rows({**given, **objects})
        return cls(_tensordict(given), objects, dict(meta_info or {}))

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: dict[str, Any] | None = None) -> DataProto:
        """A batch from one dict: tensors become tensor columns, arrays and lists object columns."""
        tensors = {key: value for key, value in data.items() if isinstance(value, Tensor)}
        return cls.from_dict(
            tensors, {key: value for key, value in data.items() if key not in tensors}, meta_info
        )

    @classmethod
    def from_tensordict(cls, data: TensorDict, meta_info: dict[str, Any] | None = None) -> DataProto:
        """A batch from a TensorDict: stacks of non-tensors become object columns, single non-tensors
        `meta_info`."""
        tensors: dict[str, Tensor] = {}
        objects: dict[str, Any] = {}
        facts = dict(meta_info or {})
        for name in list(data.keys()):
            key, leaf = str(name), data.get(name)
            if isinstance(leaf, NonTensorStack):
                objects[key] = leaf.tolist()
            elif isinstance(leaf, NonTensorData):
                facts[key] = leaf.data
            else:
                tensors[key] = leaf
        return cls.from_dict(tensors, objects, facts)

    def to_tensordict(self) -> TensorDict:
        """One TensorDict: objects as NonTensorStack, `meta_info` as NonTensorData. ValueError when a fact has
        a column's name."""
        clash = self.meta_info.keys() & set(self.keys())
        if clash:
            raise ValueError(f"meta_info and columns share the names {sorted(clash)}")
        out = TensorDict(self._tensors(), batch_size=[len(self)])
        for key, column in self.non_tensor_batch.items():
            out[key] = NonTensorStack(*[NonTensorData(item) for item in column.tolist()])
        for key, fact in self.meta_info.items():
            out.set_non_tensor(key, fact)
        return out

    # Looking

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(column) for column in self.non_tensor_batch.values()), 0)

    def keys(self) -> list[str]:
        """Names of all columns, tensors first."""
        return [*self._tensors(), *self.non_tensor_batch]

    def items(self) -> list[tuple[str, ColumnData]]:
        """All columns with their names, tensors first."""
        return [*self._tensors().items(), *self.non_tensor_batch.items()]

    def get(self, key: str) -> Any:
        """The tensor or object array named `key`. KeyError listing what there is."""
        found = dict(self.items())
        if key not in found:
            raise KeyError(f"the batch has no column {key!r}; it has {self.keys()}")
        return found[key]

    def __repr__(self) -> str:
        kinds = [f"{key}: {ragged.describe(value)}" for key, value in self._tensors().items()]
        kinds += [f"{key}: objects" for key in self.non_tensor_batch]
        return f"DataProto({len(self)} rows; {', '.join(kinds)}; meta_info: {sorted(self.meta_info)})"

    def __getitem__(self, index: int | RowIndex) -> Any:
        """One row (`DataProtoItem`) for an int, else a batch: slice, row numbers, or one bool per row."""
        if isinstance(index, int | np.integer):
            return self._item(int(index))
        if isinstance(index, slice):
            return self.slice(index.start, index.stop, index.step)
        return self.select_idxs(index)

    def to(self, device: str | torch.device) -> DataProto:
        """The same batch with its tensors on `device`."""
        return self._map_tensors(lambda _, tensor: tensor.to(device))

    # Rows

    def select_idxs(self, index: RowIndex) -> DataProto:
        """The named rows, in the named order, copied."""
        numbers = ragged.as_index(index, len(self))
        return self._map(lambda _, column: columns.take(column, numbers), len(numbers))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Rows `start:end:step`; with step 1 the columns are views."""
        rows = range(*slice(start, end, step).indices(len(self)))
        index: RowIndex = (
            slice(rows.start, rows.stop) if rows.step == 1 else np.arange(rows.start, rows.stop, rows.step)
        )
        return self._map(lambda _, column: columns.take(column, index), len(rows))

    def reorder(self, indices: RowIndex) -> None:
        """Puts row `indices[i]` at place i, in the batch itself."""
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Each row `repeat_times` times: aabb when interleaved, abab otherwise."""
        rows = np.arange(len(self))
        return self.select_idxs(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def sample_level_repeat(self, repeat_times: int | Sequence[int] | np.ndarray | Tensor) -> DataProto:
        """Row i `repeat_times[i]` times, repetitions side by side. ValueError when there is not one count per
        row."""
        times = np.asarray(repeat_times)
        if times.ndim and len(times) != len(self):
            raise ValueError(f"{len(times)} repeat counts were given for {len(self)} rows")
        return self.select_idxs(np.repeat(np.arange(len(self)), times))

    def unfold_column_chunks(self, n_split: int, split_keys: Iterable[str] | None = None) -> DataProto:
        """Cuts each row into `n_split` rows along dimension 1; columns not in `split_keys` are repeated.
        None: cuts all tensors.

        ValueError when a width or a row length does not divide by `n_split`.
        """
        keys = set(self._tensors() if split_keys is None else split_keys)
        missing = keys - set(self.keys())
        if missing:
            raise KeyError(f"the batch has no columns {sorted(missing)}; it has {self.keys()}")
        rows = np.repeat(np.arange(len(self)), n_split)
        return self._map(
            lambda key, column: (
                columns.cut_rows(column, n_split, key) if key in keys else columns.take(column, rows)
            ),
            len(rows),
        )

    def chunk(self, chunks: int) -> list[DataProto]:
        """`chunks` equal parts, as views. ValueError when the rows do not divide."""
        if chunks < 1 or len(self) % chunks:
            raise ValueError(f"{len(self)} rows do not divide into {chunks} equal chunks")
        size = len(self) // chunks
        return [self.slice(i * size, (i + 1) * size) for i in range(chunks)]

    def split(self, split_size: int) -> list[DataProto]:
        """Parts of `split_size` rows, as views; the last may be shorter. An empty batch gives no part."""
        if split_size < 1:
            raise ValueError(f"split_size is {split_size}; it must be at least 1")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Mini-batches, `epochs` times over all rows; `dataloader_kwargs={"shuffle": True}` draws a new order
        per epoch from `seed`.

        ValueError at once when the rows do not divide by `mini_batch_size`.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ValueError(f"{len(self)} rows do not divide into mini-batches of {mini_batch_size}")
        unknown = set(dataloader_kwargs or {}) - {"shuffle"}
        if unknown:
            raise ValueError(f"dataloader_kwargs may hold shuffle; got {sorted(unknown)}")
        return self._mini_batches(
            mini_batch_size, epochs, seed, bool((dataloader_kwargs or {}).get("shuffle", False))
        )

    # Columns

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> DataProto:
        """A batch of the named columns and facts, data shared; None keeps all of a kind. KeyError for a name
        that is not there."""
        tensors = _pick(self._tensors(), batch_keys, "tensor column")
        objects = _pick(self.non_tensor_batch, non_tensor_batch_keys, "object column")
        facts = _pick(self.meta_info, meta_info_keys, "meta_info")
        return DataProto(
            None if self.batch is None else TensorDict(tensors, batch_size=[len(self)]), objects, facts
        )

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> DataProto:
        """Takes the named columns and facts out of this batch and returns them; None takes none of a kind."""
        popped = self.select(
            list(batch_keys or ()), list(non_tensor_batch_keys or ()), list(meta_info_keys or ())
        )
        for key in popped._tensors():
            assert self.batch is not None
            del self.batch[key]
        for key in popped.non_tensor_batch:
            del self.non_tensor_batch[key]
        for key in popped.meta_info:
            del self.meta_info[key]
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Renames tensor or object columns in this batch and returns it. ValueError unless every old name has
        one new name."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new):
            raise ValueError(f"{len(old)} columns cannot get {len(new)} names: {old} -> {new}")
        for key in old:
            self.get(key)
        names = [dict(zip(old, new, strict=True)).get(key, key) for key in self.keys()]
        if len(set(names)) != len(names):
            raise ValueError(f"renaming {old} to {new} would give two columns one name")
        names_of = dict(zip(self.keys(), names, strict=True))
        if self.batch is not None:
            self.batch = TensorDict(
                {names_of[key]: value for key, value in self._tensors().items()}, batch_size=[len(self)]
            )
        self.non_tensor_batch = {names_of[key]: value for key, value in self.non_tensor_batch.items()}
        return self

    def union(self, other: DataProto) -> DataProto:
        """Adds the columns and facts of `other` to this batch and returns it.

        ValueError, and no change, when the row counts differ or a shared column or fact is not equal; it
        names the first differing row.
        """
        if len(self) != len(other) and all(len(part) or part.keys() for part in (self, other)):
            raise ValueError(f"batches of {len(self)} and {len(other)} rows cannot be united")
        mine = dict(self.items())
        for key, column in other.items():
            difference = columns.first_difference(mine[key], column) if key in mine else None
            if difference:
                raise ValueError(
                    f"union: column {key!r} differs between the two batches, first at {difference}"
                )
        facts = merge_facts([self.meta_info, other.meta_info], "union")
        tensors = {**other._tensors(), **self._tensors()}
        if self.batch is not None or other.batch is not None:
            self.batch = TensorDict(tensors, batch_size=[max(len(self), len(other))])
        self.non_tensor_batch = {
            **self.non_tensor_batch,
            **{k: v for k, v in other.non_tensor_batch.items() if k not in mine},
        }
        self.meta_info = facts
        return self

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Rows of all batches, one batch after the other.

        `meta_info["metrics"]` of the parts becomes a dict of lists, other facts must agree. ValueError when
        columns or facts do not.
        """
        if len(data) == 0:
            raise ValueError("concat needs at least one batch")
        parts = [dict(part.items()) for part in data]
        odd = {key for part in parts for key in part.keys() ^ parts[0].keys()}
        if odd:
            raise ValueError(f"concat: columns {sorted(odd)} are not in all of the batches")
        joined = {key: columns.concat([part[key] for part in parts], key) for key in parts[0]}
        tensors = {key: column for key, column in joined.items() if isinstance(column, Tensor)}
        objects = {key: column for key, column in joined.items() if isinstance(column, np.ndarray)}
        rows = sum(map(len, data))
        batch = None if data[0].batch is None else TensorDict(tensors, batch_size=[rows])
        return DataProto(batch, objects, concat_facts([part.meta_info for part in data]))

    # Pickling: numpy arrays out of band, no tensor goes through torch's own pickler.

    def __reduce__(self) -> tuple[Callable[..., DataProto], tuple[Any, ...]]:
        encoded = {key: wire.encode(column, key) for key, column in self.items()}
        return _unpickle, (encoded, self.meta_info, None if self.batch is None else len(self))

    # Inner parts

    def _tensors(self) -> dict[str, Tensor]:
        return {} if self.batch is None else {key: value for key, value in self.batch.items()}  # type: ignore[misc]

    def _map(self, change: Callable[[str, ColumnData], ColumnData], rows: int) -> DataProto:
        tensors = {key: change(key, value) for key, value in self._tensors().items()}
        objects = {key: change(key, value) for key, value in self.non_tensor_batch.items()}
        batch = None if self.batch is None else TensorDict(tensors, batch_size=[rows])
        return DataProto(batch, objects, dict(self.meta_info))  # type: ignore[arg-type]

    def _map_tensors(self, change: Callable[[str, Tensor], Tensor]) -> DataProto:
        return self._map(
            lambda key, column: change(key, column) if isinstance(column, Tensor) else column, len(self)
        )

    def _item(self, row: int) -> DataProtoItem:
        place = int(ragged.as_index([row], len(self))[0])
        one = self.slice(place, place + 1)
        tensors = {key: ragged.rows(value)[0] for key, value in one._tensors().items()}
        batch = None if self.batch is None else TensorDict(tensors, batch_size=[])
        return DataProtoItem(
            batch, {key: column[0] for key, column in one.non_tensor_batch.items()}, dict(self.meta_info)
        )

    def _mini_batches(self, size: int, epochs: int, seed: int | None, shuffle: bool) -> Iterator[DataProto]:
        generator = torch.Generator()
        if seed is not None:
            generator.manual_seed(seed)
        elif shuffle:
            generator.seed()
        for _ in range(epochs):
            data = self.select_idxs(torch.randperm(len(self), generator=generator)) if shuffle else self
            yield from data.split(size)


def check_rows(named: Mapping[str, Sized], expected: int | None = None) -> None:
    """ValueError when columns differ in their number of rows, or from `expected`; it names each column and
    its count."""
    counts = {key: len(column) for key, column in named.items()}
    if len({*counts.values(), *(() if expected is None else (expected,))}) > 1:
        listed = ", ".join(f"{key}: {count}" for key, count in counts.items())
        wanted = "" if expected is None else f", here {expected}"
        raise ValueError(f"all columns of a batch have the same number of rows{wanted}; got {listed}")


def merge_facts(facts: Sequence[Mapping[str, Any]], operation: str) -> dict[str, Any]:
    """All facts of several batches. ValueError naming a fact that two of them tell differently."""
    merged: dict[str, Any] = {}
    for part in facts:
        for key, value in part.items():
            if key in merged and not columns.same(merged[key], value):
                raise ValueError(
                    f"{operation}: meta_info {key!r} differs between the batches: {merged[key]!r} and"
                    f" {value!r}"
                )
            merged[key] = value
    return merged


def concat_facts(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Facts of concatenated batches: `metrics` as a dict of lists over the parts, everything else must
    agree."""
    merged = merge_facts(
        [{key: value for key, value in part.items() if key != "metrics"} for part in facts], "concat"
    )
    metrics: dict[str, list[Any]] = {}
    for part in facts:
        given = part.get("metrics") or []
        for one in given if isinstance(given, list) else [given]:
            for name, value in one.items():
                metrics.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return {**merged, "metrics": metrics} if metrics else merged


def _tensordict(tensors: Mapping[str, Tensor]) -> TensorDict | None:
    if not tensors:
        return None
    return TensorDict(dict(tensors), batch_size=[len(next(iter(tensors.values())))])


def _pick(given: Mapping[str, Any], keys: Iterable[str] | None, what: str) -> dict[str, Any]:
    if keys is None:
        return dict(given)
    wanted = list(keys)
    missing = [key for key in wanted if key not in given]
    if missing:
        raise KeyError(f"the batch has no {what} {missing}; it has {sorted(given)}")
    return {key: given[key] for key in wanted}


def _unpickle(encoded: Mapping[str, wire.Encoded], meta_info: dict[str, Any], rows: int | None) -> DataProto:
    decoded = {key: wire.decode(column) for key, column in encoded.items()}
    tensors = {key: column for key, column in decoded.items() if isinstance(column, Tensor)}
    objects = {key: column for key, column in decoded.items() if isinstance(column, np.ndarray)}
    return DataProto(None if rows is None else TensorDict(tensors, batch_size=[rows]), objects, meta_info)
