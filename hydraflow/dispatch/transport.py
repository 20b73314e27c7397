"""What travels between controller and workers: payloads of pickled values, and references to columns in the
object store.

In: any picklable value, or a worker's DataProto. Out: a `Payload` of known size, or a `Receipt` that
names the columns. A payload carries object references next to its bytes, so that Ray counts them and frees a
column with its last reference. Left out on purpose: which rows a rank gets (`shards`), and the format of a
column (`protocol.wire`).
"""

from __future__ import annotations

import io
import pickle
import socket
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import ray
from ray import ObjectRef, cloudpickle

from hydraflow.dispatch.shards import is_batch, split
from hydraflow.dispatch.spans import Span
from hydraflow.errors import LostColumns, StoreFull, first_line
from hydraflow.protocol import wire
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.remote import Column, ColumnRef, RemoteBatch

Columns = dict[str, wire.EncodedColumn]
"""Encoded columns by name."""
BUNDLE_LIMIT = 256 * 1024
"""Bytes up to which all columns of an answer share one object."""
INLINE_LIMIT = 100_000
"""Bytes up to which a value travels inside the call; a larger one is put into the object store once for all
receivers."""


class Payload(NamedTuple):
    """A pickled value: its stream, the buffers that pickle protocol 5 keeps out of band, and the references
    it holds."""

    head: bytes
    buffers: list[np.ndarray]
    refs: list[ObjectRef]
    seconds: float = 0.0
    """For an answer: how long the method ran, without transport."""
    spans: tuple[Span, ...] = ()
    """For an answer: the process's spans since its last one, if the timeline is on."""

    @property
    def nbytes(self) -> int:
        """Bytes of data; references, about 100 bytes each, are not counted."""
        return len(self.head) + sum(buffer.nbytes for buffer in self.buffers)


@dataclass
class Traffic:
    """Bytes that passed through the controller's memory since the start; columns passed by reference do not
    count."""

    sent: int = 0
    """Bytes of arguments, each value counted once for every rank it is sent to, or once if it went to the
    object store."""
    received: int = 0
    """Bytes of results and of columns that were fetched."""
    worked: defaultdict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(float))
    """By role and rank, run time of its methods in seconds."""

    @property
    def total(self) -> int:
        return self.sent + self.received

    def worked_since(self, before: Traffic, role: str) -> float:
        """Seconds that the role's busiest rank spent in methods since the snapshot `before`."""
        return max(
            (now - before.worked[key] for key, now in self.worked.items() if key[0] == role), default=0.0
        )


class _Pickler(cloudpickle.CloudPickler):
    def __init__(self, stream: io.BytesIO, buffers: list[pickle.PickleBuffer]):
        super().__init__(stream, protocol=5, buffer_callback=buffers.append)
        self.refs: dict[ObjectRef, int] = {}

    def persistent_id(self, value: object) -> int | None:
        # A reference pickled outside Ray's own serializer would be pinned forever, so it travels next to the
        # stream.
        if not isinstance(value, ObjectRef):
            return None
        return self.refs.setdefault(value, len(self.refs))


class _Unpickler(pickle.Unpickler):
    def __init__(self, payload: Payload):
        super().__init__(io.BytesIO(payload.head), buffers=payload.buffers)
        self.refs = payload.refs

    def persistent_load(self, number: int) -> ObjectRef:
        return self.refs[number]


def _put(value: object) -> ObjectRef:
    """Puts a value into this machine's object store. StoreFull when neither shared memory nor the disk that
    Ray spills to has room."""
    try:
        return ray.put(value)
    except (ray.exceptions.OutOfDiskError, ray.exceptions.ObjectStoreFullError) as error:
        raise StoreFull(
            f"Ray's object store on {socket.gethostname()} is full, and so is the disk of its temporary"
            f" folder ({type(error).__name__}). Free the disk, enlarge /dev/shm (docker run --shm-size=...),"
            " or keep less there: fewer or shorter trajectories"
            " (data.train_batch_size, data.max_response_length)."
        ) from None


def pack(value: object) -> Payload:
    """Pickles a value; arrays stay views of their memory. Lambdas and local functions work. Raises
    PicklingError or TypeError."""
    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    pickler = _Pickler(stream, buffers)
    pickler.dump(value)
    arrays = [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers]
    return Payload(stream.getvalue(), arrays, list(pickler.refs))


def unpack(payload: Payload) -> Any:
    """The value of a payload; its arrays may be read-only views of shared memory."""
    return _Unpickler(payload).load()


@dataclass
class ArgumentPacker:
    """Packs the arguments of one call: a value for several ranks is pickled once, and stored once if it
    is large. A batch that the mode did not divide becomes a shard of one part."""

    traffic: Traffic
    packed: dict[int, Payload | ObjectRef] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)
    """Values whose `id` keys `packed`; held so that no id is reused."""

    def pack(self, value: object) -> Payload | ObjectRef:
        """What to send for `value`: the payload itself, or a reference to it."""
        if id(value) not in self.packed:
            self.kept.append(value)
            payload = pack(split(value, 1)[0] if is_batch(value) else value)
            if payload.nbytes <= INLINE_LIMIT:
                self.packed[id(value)] = payload
            else:
                self.traffic.sent += payload.nbytes
                self.packed[id(value)] = _put(payload)
        argument = self.packed[id(value)]
        if isinstance(argument, Payload):
            self.traffic.sent += argument.nbytes
        return argument


def unpack_all(packed: Sequence[Payload | ObjectRef]) -> list[Any]:
    """The values that an `ArgumentPacker` sent; fetches all stored ones in one request."""
    stored = [argument for argument in packed if isinstance(argument, ObjectRef)]
    found = iter(ray.get(stored)) if stored else iter(())
    return [unpack(next(found) if isinstance(argument, ObjectRef) else argument) for argument in packed]


@dataclass(frozen=True)
class RayColumn:
    """A column in the object store (a `ColumnRef`): one worker's rows, encoded."""

    ref: ObjectRef
    rows: int
    name: str | None = None
    """Index of the column in an object that holds several."""


@dataclass(frozen=True)
class Receipt:
    """What a worker returns instead of a DataProto: the location of its columns. Zero rows and no columns:
    all rows were padding."""

    rows: int
    columns: dict[str, ObjectRef | None]
    """None: in the call's second result."""
    meta_info: dict[str, Any]
    bundled: bool = False
    """All columns are in one object."""

    def at(self, ref: ObjectRef) -> Receipt:
        """This receipt with the columns in `ref`, the call's second result."""
        return replace(self, columns=dict.fromkeys(self.columns, ref), bundled=True)

    def batch(self) -> RemoteBatch:
        """The receipt as a batch of references."""
        columns = {}
        for name, ref in self.columns.items():
            assert ref is not None, "the caller knows where its second result is"
            columns[name] = Column((RayColumn(ref, self.rows, name if self.bundled else None),), None)
        return RemoteBatch(columns, {}, dict(self.meta_info))


def put_batch(data: DataProto) -> Receipt:
    """Puts every column, tensors and objects alike, into this process's object store; small ones together, as
    one object.

    A column with its own object is read only by workers that need it, but each object costs about as much as
    moving a hundred kilobytes.
    """
    if not data.keys():
        return Receipt(0, {}, dict(data.meta_info))
    encoded = _encoded(data)
    if sum(column.nbytes for column in encoded.values()) <= BUNDLE_LIMIT:
        bundle = _put(encoded)
        return Receipt(len(data), dict.fromkeys(encoded, bundle), dict(data.meta_info), bundled=True)
    refs: dict[str, ObjectRef | None] = {name: _put(column) for name, column in encoded.items()}
    return Receipt(len(data), refs, dict(data.meta_info))


def with_columns(data: DataProto) -> tuple[Receipt, Columns]:
    """The receipt, and all columns as the call's second result: the caller owns it, so it outlives the
    process that made it."""
    columns = _encoded(data)
    return Receipt(len(data), dict.fromkeys(columns), dict(data.meta_info), bundled=True), columns


def _encoded(data: DataProto) -> Columns:
    return {name: wire.encode(column, name) for name, column in data.items()}


def join(receipts: Sequence[Receipt]) -> RemoteBatch:
    """The rows of several workers, in the given order."""
    filled = [receipt for receipt in receipts if receipt.rows] or receipts
    return RemoteBatch.concat([receipt.batch() for receipt in filled])


def read_columns(
    refs: Sequence[ColumnRef],
    traffic: Traffic | None = None,
    timeout: float | None = None,
    wait: Callable[[list[ObjectRef]], None] | None = None,
) -> list[wire.ColumnData]:
    """The columns behind `RayColumn`s, in one request; tensors are read-only views of the object store.

    wait: called first with the objects to read; it may wait for them, and raise errors of its own. Raises
    LostColumns when a column is gone with the process that made it, or does not arrive within `timeout`
    seconds.
    """
    wanted = [ref for ref in refs if isinstance(ref, RayColumn)]
    assert len(wanted) == len(refs), "all columns must be in the object store"
    objects = list(dict.fromkeys(column.ref for column in wanted))
    if wait is not None:
        wait(objects)
    try:
        found = dict(zip(objects, ray.get(objects, timeout=timeout), strict=True))
    except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError) as error:
        first = first_line(error)
        why = f"the process that made them is gone or busy ({first})"
        raise LostColumns(f"{len(wanted)} columns cannot be read: {why}") from None
    encoded = [found[one.ref] if one.name is None else found[one.ref][one.name] for one in wanted]
    if traffic is not None:
        traffic.received += sum(column.nbytes for column in encoded)
    return [wire.decode(column, copy=False) for column in encoded]
