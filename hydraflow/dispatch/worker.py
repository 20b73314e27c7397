"""A worker process: holds the workers of several roles and runs one of their methods at a time.

In: the roles' classes, then calls with their arguments. Out: answers; a DataProto stays here, column by
column in the object store. An exception becomes a `Failure` that is returned like an answer, so that it
reaches the calls that depend on it. Left out on purpose: the Ray actor around it (`host.py`), what workers
do (`hydraflow.workers`), and torch.distributed, which engines start at the given address.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
import torch
from ray import ObjectRef
from torch.profiler import record_function

from hydraflow.device import current_device, keep_freed_memory
from hydraflow.dispatch.environment import LOOPBACK, settle
from hydraflow.dispatch.host import RankInfo
from hydraflow.dispatch.observability import Observability, of_role
from hydraflow.dispatch.profiler import Profile
from hydraflow.dispatch.shards import LateShard, Shard, part_of, real_rows
from hydraflow.dispatch.spans import SpanRecorder, record_into, span
from hydraflow.dispatch.stacks import ProcessInfo
from hydraflow.dispatch.transport import (
    Columns,
    Payload,
    Receipt,
    join,
    pack,
    put_batch,
    read_columns,
    unpack,
    unpack_all,
    with_columns,
)
from hydraflow.errors import (
    ConfigError,
    DoesNotFit,
    GuardStop,
    HydraflowError,
    LostColumns,
    StoreFull,
    WorkerError,
)
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.coordinates import Coordinates
from hydraflow.protocol.remote import materialise
from hydraflow.system.importing import importing
from hydraflow.system.network import VARIABLE, node_address
from hydraflow.system.role_logs import STANDARD_ERROR, write_stacks_when_asked

LOG_LINES = 30
FRAMES = 4
"""Innermost stack frames that an error message shows."""


@dataclass
class ProcessContext:
    """What a worker knows about its process."""

    rank: int
    world_size: int
    local_rank: int
    node: str
    """Host name."""
    address: str
    """Address at which other machines reach this one."""
    master_addr: str
    master_port: int
    """Address and port at which rank 0 of the group listens; the same on all ranks."""
    device_type: str
    """cpu or cuda."""
    timeout_s: float
    """Timeout of one call in seconds; also the longest sensible wait for other ranks."""
    roles: dict[str, Worker] = field(default_factory=dict)
    """Workers of this process by role, in the order in which they are built."""
    listen_fd: int | None = None
    """On rank 0: a socket that holds master_port until the rendezvous takes it over."""

    def device(self) -> torch.device:
        """The process's device, made current."""
        return current_device(self.device_type, self.local_rank)


class Worker:
    """Base of every role: built once in each process of its group."""

    def __init__(self, process: ProcessContext):
        self.process = process

    def mesh_coordinates(self, mesh: str) -> Coordinates:
        """This worker's coordinates in a named mesh; by default every rank is a data rank of its own."""
        return Coordinates(self.process.rank, self.process.world_size, True)

    def after_call(self) -> None:
        """Runs after each method that the controller called, unless it raised."""

    def close(self) -> None:
        """Releases what the worker started; called only if its process outlives it."""


@dataclass(frozen=True)
class RoleSpec:
    """How the worker of a role is built: `cls(process, *args, **kwargs)`."""

    cls: type[Worker]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """One method call as it reaches a process."""

    role: str
    method: str
    args: list[Payload | ObjectRef]
    kwargs: dict[str, Payload | ObjectRef]
    read_only: bool
    wanted: bool
    """Whether the answer is used; else nothing is sent back."""
    seconds: float
    """Seconds after which the process writes its stacks to its log."""
    returns_columns: bool = False
    """Columns of the answer are the call's second result; else they stay in the process's object store."""


@dataclass(frozen=True)
class Failure:
    """The answer of a call that failed."""

    error: HydraflowError
    """One of UNCHANGED; during the build also a ConfigError."""
    at: float
    """Unix time, for finding the first cause among several ranks."""
    died: bool = False
    """Whether the process is gone."""
    lost_columns: bool = False
    """Whether it could not read columns that another process made."""

    @property
    def cause(self) -> str:
        """The message without the call's name and the log."""
        return self.error.cause if isinstance(self.error, WorkerError) else str(self.error)


class WorkerProcess:
    """Runs in the Ray actor; every public method returns a payload."""

    def __init__(
        self,
        rank_info: RankInfo,
        device_type: str,
        threads: int,
        timeout_s: float,
        import_path: Sequence[str],
        observability: Observability,
        first_role: str,
    ):
        self.rank_info = rank_info
        self.device_type = device_type
        self.timeout_s = timeout_s
        self.workers: dict[str, Worker] = {}
        self._listener: socket.socket | None = None
        self._unfit: HydraflowError | None = None
        """Environment error from __init__, raised by `build` because Ray hides errors of actor
        constructors."""
        try:
            settle(rank_info.rank, node_ip=self._address())
        except HydraflowError as error:
            self._unfit = error
        self.first_role = first_role
        self.profile: Profile | None = None
        self.recorder = SpanRecorder()
        record_into(self.recorder if observability.traced else None)
        # of the controller's import path, Ray passes on only the working folder and the script's folder
        sys.path += [folder for folder in import_path if folder not in sys.path]
        logging.basicConfig(
            level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        self.logs = observability.open_logs(rank_info.rank, first_role)
        write_stacks_when_asked()
        torch.set_num_threads(threads)
        keep_freed_memory(device_type)

    def identify(self) -> Payload:
        """This process's node, pid and log file."""
        context = ray.get_runtime_context()
        return pack(ProcessInfo(os.getpid(), context.get_node_id(), context.get_worker_id(), log_path()))

    def rendezvous(self) -> tuple[str, int]:
        """An address of this node that the group's other processes can reach, and a port that is held until a
        worker takes it over.

        torch's rendezvous and gloo have no authentication, so they listen on this address only.
        """
        address = self._address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        return address, self._listener.getsockname()[1]

    def _address(self) -> str:
        return ray.util.get_node_ip_address() if self.rank_info.spans_nodes else LOOPBACK

    def build(self, roles: Payload | ObjectRef, rendezvous: tuple[str, int]) -> Payload:
        """Builds the workers, in order."""
        where = self.rank_info
        with _Guard(where, "worker process", "__init__", unchanged=(*UNCHANGED, ConfigError)) as guard:
            if self._unfit is not None:
                raise self._unfit
            process = ProcessContext(
                where.rank,
                where.world_size,
                where.local_rank,
                where.node,
                node_address() if os.environ.get(VARIABLE) else ray.util.get_node_ip_address(),
                *rendezvous,
                self.device_type,
                self.timeout_s,
                listen_fd=self._listener.detach() if self._listener is not None else None,
                roles=self.workers,
            )
            with importing():  # unpickling imports the roles' classes
                specs = unpack_all([roles])[0]
            for guard.role, spec in specs.items():  # an error names the role that is being built
                with of_role(self.logs, guard.role), span("start", guard.role):
                    self.workers[guard.role] = spec.cls(process, *spec.args, **spec.kwargs)
        return self._with_spans(guard.answer)

    def coordinates(self, role: str, mesh: str) -> Payload:
        with _Guard(self.rank_info, role, f"mesh_coordinates({mesh!r})") as guard:
            guard.answer = pack(Coordinates(*self.workers[role].mesh_coordinates(mesh)))
        return guard.answer

    def invoke(self, call: Call) -> tuple[Payload, Columns]:
        """Runs one method of one worker; with the columns that the call returns."""
        columns: Columns = {}
        with of_role(self.logs, call.role):
            with _Guard(self.rank_info, call.role, call.method) as guard:
                guard.answer, columns = self._run(call)
            faulthandler.cancel_dump_traceback_later()
        return self._with_spans(guard.answer), columns

    def start_profile(self, profile: Profile) -> Payload:
        with _Guard(self.rank_info, self.first_role, "start_profile") as guard:
            profile.start(self.device_type)
            self.profile = profile
        return guard.answer

    def stop_profile(self) -> Payload:
        with _Guard(self.rank_info, self.first_role, "stop_profile") as guard:
            if self.profile is not None:  # otherwise this process replaced the one that started it
                try:
                    self.profile.stop(self.rank_info.rank)
                except OSError as error:  # the run can do without
                    logging.getLogger(__name__).warning(
                        "the profile in %s cannot be written: %s", self.profile.folder, error
                    )
            self.profile = None
        return guard.answer

    def _with_spans(self, answer: Payload) -> Payload:
        return answer._replace(spans=tuple(self.recorder.drain()))

    def _run(self, call: Call) -> tuple[Payload, Columns]:
        with span("read"):  # includes waiting for batches from other workers
            values = [_cut(value) for value in unpack_all([*call.args, *call.kwargs.values()])]
            shards = [value for value in values if isinstance(value, Shard)]
            read = partial(materialise, fetch=read_columns, copy=not call.read_only)
            ready = [read(value.batch) if isinstance(value, Shard) else value for value in values]
        named = dict(zip(call.kwargs, ready[len(call.args) :], strict=True))
        faulthandler.dump_traceback_later(call.seconds, file=STANDARD_ERROR)
        started = time.perf_counter()
        with span(call.method), record_function(f"{call.role}.{call.method}"):
            answer = getattr(self.workers[call.role], call.method)(*ready[: len(call.args)], **named)
            self.workers[call.role].after_call()
        seconds = time.perf_counter() - started
        with span("write"):
            reply, columns = _reply(answer if call.wanted else None, shards, call.returns_columns)
        return reply._replace(seconds=seconds), columns


def _reply(answer: Any, shards: Sequence[Shard], returns_columns: bool) -> tuple[Payload, Columns]:
    """The packed answer. A batch is packed without its columns and without rows computed from padding."""
    if not isinstance(answer, DataProto):
        if answer is not None and any(shard.rows < len(shard.batch) for shard in shards):
            rule = "rows were padded, and its answer is no batch, from which they could be removed"
            raise ValueError(f"{rule}: register the method with padding=False")
        return pack(answer), {}
    real = real_rows(shards, len(answer))
    rows = answer if real == len(answer) else answer[:real]
    receipt, columns = with_columns(rows) if returns_columns else (put_batch(rows), {})
    return pack(receipt), columns


NOTHING = pack(None)


class DependencyFailed(Exception):
    """A call that this one depends on has failed."""

    def __init__(self, failure: Failure):
        super().__init__(str(failure.error))
        self.failure = failure


def _cut(value: Any) -> Any:
    """The rows of a late shard, once they exist; any other value unchanged."""
    if not isinstance(value, LateShard):
        return value
    receipts = [unpack(payload) for payload in ray.get(list(value.receipts))]
    for receipt in receipts:
        if isinstance(receipt, Failure):
            raise DependencyFailed(receipt)
        if not isinstance(receipt, Receipt):
            made = type(receipt).__name__
            raise TypeError(f"an argument is the future of a batch, but the call behind it returned a {made}")
    return part_of(join(receipts), value)


DECISIONS = (GuardStop, DoesNotFit, StoreFull)
"""Errors shown to the user verbatim: the worker is intact, but the run cannot continue."""
UNCHANGED = (WorkerError, *DECISIONS)
"""Errors that reach the controller unchanged."""


class _Guard:
    """Turns an exception in its body into the answer, a packed `Failure`: one of the types `unchanged` as it
    is, any other as a WorkerError."""

    def __init__(
        self,
        rank_info: RankInfo,
        role: str,
        method: str,
        unchanged: tuple[type[HydraflowError], ...] = UNCHANGED,
    ):
        self.rank_info, self.role, self.method, self.unchanged = rank_info, role, method, unchanged
        self.answer = NOTHING

    def __enter__(self) -> _Guard:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.answer = pack(error.failure if isinstance(error, DependencyFailed) else self._failure(error))
        return True

    def _failure(self, error: Exception) -> Failure:
        if isinstance(error, self.unchanged):
            return Failure(error, time.time())
        frames = traceback.format_list(traceback.extract_tb(error.__traceback__)[-FRAMES:])
        cause = f"{type(error).__name__}: {error}\n{''.join(frames)}".rstrip()
        rank, node, tail = self.rank_info.rank, self.rank_info.node, log_tail(log_path())
        names: dict[str, Any] = {"role": self.role, "rank": rank, "node": node, "method": self.method}
        lost = isinstance(error, LostColumns)
        return Failure(WorkerError(**names, cause=cause, log_tail=tail), time.time(), lost_columns=lost)


def log_path() -> str:
    """The file that this process's standard error goes to."""
    return os.readlink("/proc/self/fd/2")


def log_tail(path: str) -> str:
    """The last lines of a log; empty when it is not a file of this machine."""
    if not os.path.isfile(path):
        return ""
    with open(path, "rb") as log:
        log.seek(max(0, os.path.getsize(path) - 8192))
        return "\n".join(log.read().decode(errors="replace").splitlines()[-LOG_LINES:])
