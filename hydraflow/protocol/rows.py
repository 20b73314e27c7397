"""Row and column operations shared by `DataProto` and `RemoteBatch`, wherever their columns are.

In: columns (tensors, or references to them), objects per row, facts about the whole batch. Out: new batches;
only `union`, `pop`, `rename` and `reorder` change the batch itself, as in verl. Left out on purpose: anything
that reads a tensor (`batch`) or resolves references (`remote`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, Self

import numpy as np

from hydraflow.protocol.columns import first_difference, n_rows, same
from hydraflow.protocol.ragged import RowIndex


class Rows(ABC):
    """A batch of rows. Failures caused by the user's data raise ValueError or KeyError naming the column."""

    meta_info: dict[str, Any]

    @abstractmethod
    def __len__(self) -> int: ...

    def keys(self) -> list[str]:
        """Names of all columns, objects last."""
        return [*self._columns(), *self._objects()]

    # Rows

    @abstractmethod
    def select_idxs(self, index: RowIndex) -> Self:
        """The selected rows, in the order of `index`."""

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Rows `start:end:step`."""
        return self.select_idxs(slice(start, end, step))

    def reorder(self, indices: RowIndex) -> None:
        """Moves row `indices[i]` to position i, in place."""
        ordered = self.select_idxs(indices)
        self._set(ordered._columns(), ordered._objects(), len(ordered))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Each row `repeat_times` times: aabb when interleaved, abab otherwise."""
        rows = np.arange(len(self))
        return self.select_idxs(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def chunk(self, chunks: int) -> list[Self]:
        """`chunks` equal parts, tensors as views. ValueError when `chunks` does not divide the rows."""
        if chunks < 1 or len(self) % chunks:
            raise ValueError(f"{len(self)} rows do not divide into {chunks} equal chunks")
        size = len(self) // chunks
        return [self.slice(i * size, (i + 1) * size) for i in range(chunks)]

    def split(self, split_size: int) -> list[Self]:
        """Parts of `split_size` rows, tensors as views; the last may be shorter. An empty batch has none."""
        if split_size < 1:
            raise ValueError(f"split_size is {split_size}; it must be at least 1")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    # Columns

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> Self:
        """A batch of the named columns, objects and facts, data shared; None keeps all of a kind. KeyError
        for a name that is not there."""
        columns = _pick(self._columns(), batch_keys, "column")
        objects = _pick(self._objects(), non_tensor_batch_keys, "object column")
        return self._like(columns, objects, _pick(self.meta_info, meta_info_keys, "meta_info"), len(self))

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> Self:
        """Removes the named columns, objects and facts and returns them; None takes none of a kind."""
        popped = self.select(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        self._drop(popped.keys())
        for key in popped.meta_info:
            del self.meta_info[key]
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Renames columns or objects in this batch and returns it. ValueError unless each old name gets one
        distinct new name."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if missing := [key for key in old if key not in self.keys()]:
            raise KeyError(f"the batch has no columns {missing}; it has {self.keys()}")
        if not len(set(old)) == len(old) == len(new):
            raise ValueError(f"{len(set(old))} columns cannot get {len(new)} names: {old} -> {new}")
        change = dict(zip(old, new, strict=True))
        if len({change.get(key, key) for key in self.keys()}) != len(self.keys()):
            raise ValueError(f"renaming {old} to {new} would give two columns one name")
        kinds = (self._columns(), self._objects())
        columns, objects = ({change.get(key, key): kind[key] for key in kind} for kind in kinds)
        self._set(columns, objects, len(self))
        return self

    def union(self, other: Self) -> Self:
        """Adds the columns and facts of `other` to this batch and returns it. ValueError, and no change, when
        the row counts differ or a shared column or fact is not equal; it names the first differing row."""
        # a batch without columns, only facts, unites with any
        if len(self) != len(other) and all(len(part) or part.keys() for part in (self, other)):
            raise ValueError(f"batches of {len(self)} and {len(other)} rows cannot be united")
        mine = {**self._columns(), **self._objects()}
        for key, theirs in {**other._columns(), **other._objects()}.items():
            difference = self._difference(mine[key], theirs) if key in mine else None
            if difference:
                raise ValueError(f"union: column {key!r} {difference}")
        self.meta_info = merge_facts([self.meta_info, other.meta_info], "union")
        rows = max(len(self), len(other))
        self._set({**other._columns(), **self._columns()}, {**other._objects(), **self._objects()}, rows)
        return self

    # For subclasses to implement

    @abstractmethod
    def _columns(self) -> dict[str, Any]:
        """All columns but the objects, by name."""

    @abstractmethod
    def _objects(self) -> dict[str, np.ndarray]:
        """Object arrays (B, ...), by name."""

    @abstractmethod
    def _like(
        self, columns: dict[str, Any], objects: dict[str, Any], facts: dict[str, Any], rows: int
    ) -> Self:
        """A batch of the same kind."""

    @abstractmethod
    def _set(self, columns: dict[str, Any], objects: dict[str, np.ndarray], rows: int) -> None:
        """Replaces the columns of this batch."""

    @abstractmethod
    def _drop(self, keys: Iterable[str]) -> None:
        """Removes columns and objects from this batch."""

    def _difference(self, mine: Any, theirs: Any) -> str | None:
        """How two columns of the same name differ, in words; None: they are equal."""
        where = first_difference(mine, theirs)
        return f"differs between the two batches, first at {where}" if where else None


def check_rows(named: Mapping[str, Sized], expected: int | None = None) -> None:
    """ValueError when columns differ in their number of rows, or from `expected`; it names each."""
    counts = {key: n_rows(column) for key, column in named.items()}
    if len({*counts.values(), *(() if expected is None else (expected,))}) > 1:
        listed = ", ".join(f"{key}: {count}" for key, count in counts.items())
        wanted = "" if expected is None else f", here {expected}"
        raise ValueError(f"all columns of a batch have the same number of rows{wanted}; got {listed}")


def merge_facts(facts: Sequence[Mapping[str, Any]], operation: str) -> dict[str, Any]:
    """All facts of several batches. ValueError naming a fact on which two of them disagree."""
    merged: dict[str, Any] = {}
    for part in facts:
        for key, value in part.items():
            if key in merged and not same(merged[key], value):
                differs = f"meta_info {key!r} differs between the batches"
                raise ValueError(f"{operation}: {differs}: {merged[key]!r} and {value!r}")
            merged[key] = value
    return merged


def concat_facts(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Facts of concatenated batches: `metrics` as a dict of lists, everything else must agree."""
    others = [{key: value for key, value in part.items() if key != "metrics"} for part in facts]
    merged = merge_facts(others, "concat")
    metrics: dict[str, list[Any]] = {}
    for part in facts:
        given = part.get("metrics") or []
        for one in given if isinstance(given, list) else [given]:
            for name, value in one.items():
                metrics.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return {**merged, "metrics": metrics} if metrics else merged


def _pick(given: Mapping[str, Any], keys: Iterable[str] | None, what: str) -> dict[str, Any]:
    if keys is None:
        return dict(given)
    wanted = list(keys)
    missing = [key for key in wanted if key not in given]
    if missing:
        raise KeyError(f"the batch has no {what} {missing}; it has {sorted(given)}")
    return {key: given[key] for key in wanted}
