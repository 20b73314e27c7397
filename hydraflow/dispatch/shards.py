"""Which rows of a batch go to which rank. Batches are sliced here, on the controller, or later, on the worker
that needs the part.

In: a DataProto, a RemoteBatch, or a future of one, and the number of parts. Out: one `Shard` or `LateShard`
per part. Rows that do not divide are padded by repeated rows, if that is allowed; a shard knows how many of
its rows are real. Left out on purpose: which rank gets which part (`modes`), and any tensor: a shard moves
references and row numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray import ObjectRef

from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.remote import RemoteBatch


@dataclass(frozen=True)
class Shard:
    """One part of a batch."""

    batch: RemoteBatch
    rows: int
    """Number of real rows; the rest, at the end, is padding and is removed from the result."""


@dataclass(frozen=True)
class LateShard:
    """One part of a batch that does not exist yet; the receiving worker waits for the receipts and slices its
    part itself."""

    receipts: tuple[ObjectRef, ...]
    """Answers of the ranks that produce the batch, in row order."""
    part: int
    parts: int
    padding: bool
    keys: tuple[str, ...] | None = None
    """The columns to select, without row objects and meta_info; None: everything."""


class Future(ABC):
    """The result of a call that may still be running. It can be an argument of another call without being
    awaited first."""

    joins: bool
    """Whether it can be passed on before it is ready: the mode concatenates batches."""

    @abstractmethod
    def get(self) -> Any:
        """Waits for the result. Raises WorkerError when this call, or any other pending one, fails."""

    @abstractmethod
    def shards(self, parts: int, padding: bool) -> list[LateShard] | list[Shard]:
        """One for each receiving rank; the receiving workers slice late ones themselves."""

    def columns(self, *keys: str) -> Future | RemoteBatch:
        """Only these columns of the batch; waits first where the mode does not concatenate batches."""
        return ColumnsFuture(self, keys) if self.joins else self.get().select(keys, [], [])


class CompletedFuture(Future):
    """A result that is already available.

    >>> CompletedFuture(7).get()
    7
    """

    joins = False

    def __init__(self, value: Any):
        self._value = value

    def get(self) -> Any:
        return self._value

    def shards(self, parts: int, padding: bool) -> list[LateShard] | list[Shard]:
        return split(self._value, parts, padding=padding)


@dataclass(frozen=True)
class ColumnsFuture(Future):
    """Some columns of a batch that is still being computed."""

    whole: Future
    keys: tuple[str, ...]
    joins = True

    def get(self) -> RemoteBatch:
        batch: RemoteBatch = self.whole.get()
        return batch.select(self.keys, [], [])

    def shards(self, parts: int, padding: bool) -> list[LateShard]:
        late = [shard for shard in self.whole.shards(parts, padding) if isinstance(shard, LateShard)]
        assert len(late) == parts, "a future that concatenates batches is sliced by its receivers"
        return [replace(shard, keys=self.keys) for shard in late]


def is_batch(value: object) -> bool:
    """Whether an argument has rows to divide."""
    return isinstance(value, DataProto | RemoteBatch | Future)


def split(value: object, parts: int, *, padding: bool = True) -> list[Shard] | list[LateShard]:
    """`parts` equal shards of a batch, in row order.

    Raises ValueError, with the numbers, when rows do not divide and `padding` is False, or when columns have
    no rows. A batch without columns, of meta_info only, goes to every part.
    """
    if isinstance(value, DataProto):
        value = RemoteBatch.from_local(value)
    if isinstance(value, Future):
        return value.shards(parts, padding)
    if not isinstance(value, RemoteBatch):
        raise TypeError(f"only batches can be split over ranks, not a {type(value).__name__}")
    return _split_rows(value, parts, padding)


def part_of(batch: RemoteBatch, late: LateShard) -> Shard:
    """The part of a late shard, once its batch exists."""
    if late.keys is not None:
        batch = batch.select(late.keys, [], [])
    return _split_rows(batch, late.parts, late.padding)[late.part]


def _split_rows(batch: RemoteBatch, parts: int, padding: bool) -> list[Shard]:
    rows = len(batch)
    if parts == 1:
        return [Shard(batch.localised(), rows)]
    if not batch.keys():
        return [Shard(batch, 0)] * parts
    if rows == 0:
        raise ValueError(f"a batch without rows cannot be split over {parts} ranks")
    if rows % parts and not padding:
        below = rows // parts * parts
        would = f"{below} or {below + parts}" if below else str(parts)
        rule = f"{rows} rows do not divide over {parts} ranks, and this method takes no padded rows"
        raise ValueError(f"{rule}; {would} would")
    padded, _ = batch.pad_to_divisor(parts)
    size = len(padded) // parts
    real = [min(max(rows - part * size, 0), size) for part in range(parts)]
    return [Shard(piece.localised(), count) for piece, count in zip(padded.chunk(parts), real, strict=True)]


def real_rows(shards: Sequence[Shard], made: int) -> int:
    """How many of the `made` rows that a method returned are real, given the shards it got.

    A method may return several rows per input row (samples per prompt), contiguously; ValueError when
    it returns another number.
    """
    padded = next((shard for shard in shards if shard.rows < len(shard.batch)), None)
    if padded is None:
        return made
    given = len(padded.batch)
    for shard in shards:
        if len(shard.batch) and (shard.rows, len(shard.batch)) != (padded.rows, given):
            raise ValueError("got batches with different numbers of rows, of which one is padded")
    if made % given:
        padding = f"of which {given - padded.rows} are padding"
        raise ValueError(f"returned {made} rows for {given}, {padding}: {made} is not a multiple of {given}")
    return padded.rows * (made // given)
