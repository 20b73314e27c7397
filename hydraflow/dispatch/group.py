"""A worker group: one process per rank, several roles in each process, and the controller's calls to them.

In: a reservation and the roles. Out: results of calls; batches come back as references (`RemoteBatch`).
A call is made by naming the method: `actors.call(ActorWorker.update, batch)`.
After a failure the processes are ended and the group refuses further calls with the first cause; a group with
a `Recovery` replaces a process that has died.
Left out on purpose: how arguments are distributed (`modes`), waiting and failure (`future`).
"""

from __future__ import annotations

import logging
import platform
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef

from hydraflow.dispatch.future import FETCH, CallFuture, PendingCall, PendingCalls, ReplacementDied
from hydraflow.dispatch.host import WorkerHost
from hydraflow.dispatch.modes import CallContext, PerRank, Registration, registration
from hydraflow.dispatch.observability import Observability
from hydraflow.dispatch.placement import Reservation
from hydraflow.dispatch.profiler import Profile, nsight_options
from hydraflow.dispatch.shards import Future, LateShard
from hydraflow.dispatch.stacks import NamedProcess, ProcessInfo, names_of
from hydraflow.dispatch.template import has_template
from hydraflow.dispatch.timeline import Timeline
from hydraflow.dispatch.transport import ArgumentPacker, Traffic, read_columns
from hydraflow.dispatch.worker import Call, RoleSpec
from hydraflow.errors import HydraflowError, LostColumns, WorkerError
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.coordinates import Coordinates
from hydraflow.protocol.remote import RemoteBatch, materialise
from hydraflow.system.network import unreachable

log = logging.getLogger(__name__)
WORKER_PROCESS = "worker process"
NOT_FORKED = "HYDRAFLOW_NOT_FORKED"
"""An environment variable for Ray to set: the worker gets a process without preloaded imports
(`template.py`)."""
Ask = Callable[[int], list[ObjectRef]]
"""Sends a call to a rank; returns the references of its results."""


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of the controller, in seconds."""

    start: float = 300.0
    """For processes to start and build their roles."""
    call: float = 3600.0
    """For any one call."""


RAYLET_SECONDS = 5.0
"""Seconds for a machine's raylet to accept a connection; one that was killed refuses it at once."""


@dataclass
class Channel:
    """Shared by all groups of a runtime: pending calls, byte counts, timeouts and observability."""

    timeouts: Timeouts = field(default_factory=Timeouts)
    traffic: Traffic = field(default_factory=Traffic)
    observability: Observability = field(default_factory=Observability)
    timeline: Timeline = field(default_factory=Timeline)

    def __post_init__(self) -> None:
        self.calls = PendingCalls(self.traffic, self.timeline)


@dataclass(frozen=True)
class Recovery:
    """How a group replaces a process that dies. Only for roles that take part in no collective and hold no
    state that would be lost."""

    restore: Callable[[int], None]
    """Brings a rank's new process to the state of the others."""
    max_retries: int
    """Maximum number of resends of one call."""


class Group(ABC):
    """Workers that hold the same roles, wherever they run."""

    roles: dict[str, RoleSpec]
    channel: Channel
    processes: dict[int, ProcessInfo]
    """The processes that have reported where they run, by rank."""
    former: Sequence[NamedProcess] = ()
    """Former processes that have been replaced."""

    world_size: int
    """Number of ranks."""
    recovery: Recovery | None = None
    """None: the death of a process ends the group."""
    error: HydraflowError | None = None
    """Why the group has ended; every later call raises it."""
    replaced: int = 0
    """Processes that have been replaced."""
    before_call: Callable[[str, str], None] | None = None
    """Called with role and method before each call is sent; may raise to refuse it."""

    @abstractmethod
    def await_ready(self) -> None:
        """Waits until all workers are built. Raises ConfigError when one finds a user error, WorkerError when
        it fails otherwise."""

    @abstractmethod
    def mesh(self, role: str, name: str) -> list[Coordinates]:
        """Coordinates of all ranks in a mesh. Raises ValueError when they are inconsistent."""

    @abstractmethod
    def send(self, plan: Registration, context: CallContext, arguments: PerRank) -> Future:
        """Sends a call whose arguments are already divided by rank."""

    @abstractmethod
    def start_profile(self, tool: str, folder: str, ranks: Sequence[int] | None) -> None:
        """Starts a profile in the processes of those ranks; None: all. Raises WorkerError when one fails."""

    @abstractmethod
    def stop_profile(self, ranks: Sequence[int] | None) -> None:
        """Ends the profile and writes it."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the workers."""

    def role(self, name: str) -> RoleGroup:
        """The workers of one role."""
        assert name in self.roles, f"no role {name!r} in this group; there are {', '.join(self.roles)}"
        return RoleGroup(self, name)


class WorkerGroup(Group):
    """Processes of one pool that hold the same roles.

    The constructor returns at once, so that several groups start at the same time; `await_ready` waits. A
    worker's exception, death or silence raises one WorkerError that names role, rank, node and method; a
    ConfigError of a worker that is being built is raised unchanged.
    """

    def __init__(
        self,
        reservation: Reservation,
        roles: Mapping[str, RoleSpec],
        channel: Channel,
        *,
        device_type: str = "cpu",
        env_vars: Mapping[str, str] | None = None,
    ):
        self.rank_infos = reservation.rank_infos
        self.world_size = len(self.rank_infos)
        self.roles = dict(roles)
        self.channel = channel
        self._meshes: dict[tuple[str, str], list[Coordinates]] = {}
        self._reservation = reservation
        self._env_vars, self._device_type = dict(env_vars or {}), device_type
        self._hosts = [self._host(rank) for rank in range(self.world_size)]
        self._rendezvous = self._hosts[0].rendezvous.remote()
        self.processes = {}
        self._starting = self._build(range(self.world_size))

    def _host(self, rank: int) -> Any:
        """Starts the process of a rank."""
        observability = self.channel.observability
        nsight = nsight_options(observability, "+".join(self.roles), rank, self._device_type)
        environment = observability.environment()
        if has_template() and (self._env_vars or self._device_type != "cpu"):
            # a fork has imported libraries already, and they may read the variables on import
            environment = {**environment, NOT_FORKED: "1"}
        options = self._reservation.actor_options(rank, environment, nsight)
        # with task events Ray's control service grows by some kilobytes per step, up to 100,000 calls
        host: Any = ray.remote(WorkerHost).options(enable_task_events=observability.traced, **options)
        threads = self._reservation.pool.threads
        variables = {"OMP_NUM_THREADS": str(threads)} | self._env_vars
        settings = (self._device_type, threads, self.channel.timeouts.call, sys.path, observability)
        return host.remote(self.rank_infos[rank], variables, *settings, next(iter(self.roles)))

    def _build(self, ranks: Sequence[int]) -> list[dict[int, ObjectRef]]:
        """Builds the roles in the processes of those ranks; returns the answers to wait for."""
        roles = ArgumentPacker(self.channel.traffic).pack(self.roles)
        start = ranks, WORKER_PROCESS, "__init__"
        how: dict[str, Any] = dict(seconds=self.channel.timeouts.start, resend=False, renews=False)
        return [
            self._ask(self._identify, *start, answers=self.processes, **how),
            self._ask(lambda rank: [self._hosts[rank].build.remote(roles, self._rendezvous)], *start, **how),
        ]

    def _identify(self, rank: int) -> list[ObjectRef]:
        return [self._hosts[rank].identify.remote()]

    def _ask(
        self,
        ask: Ask,
        ranks: Sequence[int],
        role: str,
        method: str,
        *,
        answers: dict[int, Any] | None = None,
        seconds: float | None = None,
        resend: bool = True,
        awaits: frozenset[ObjectRef] = frozenset(),
        renews: bool = True,
    ) -> dict[int, ObjectRef]:
        """Sends a call to those ranks. Returns the answers to wait for, by rank; each is stored in `answers`
        when it arrives. `seconds` None: the limit of any call. `awaits` and `renews`: see `PendingCall`."""
        refs: dict[int, ObjectRef] = {}
        given = {} if answers is None else answers
        limit = self.channel.timeouts.call if seconds is None else seconds
        deadline = time.monotonic() + limit
        for rank in ranks:
            what = (role, rank, self.rank_infos[rank].node, method)
            again = partial(ask, rank) if resend else None
            call = PendingCall(self, *what, limit, deadline, given, refs, again, awaits, renews)
            self._owe(call, ask(rank))
        return refs

    def _owe(self, call: PendingCall, results: list[ObjectRef]) -> None:
        """Records a call as pending: the answer is its first result, the columns its second."""
        call.refs[call.rank] = results[0]
        columns = results[1] if len(results) > 1 else None
        self.channel.calls.pending[results[0]] = replace(call, columns=columns)

    def ask_idle(self) -> None:
        """Sends a call to each process that has none pending: only its death would go unnoticed. The answer
        is not used. Does nothing where a process that has died is replaced, because what it returned outlives
        it."""
        if self.recovery is None:
            busy = {call.rank for call in self.channel.calls.pending.values() if call.group is self}
            idle = [rank for rank in range(self.world_size) if rank not in busy]
            self._ask(self._identify, idle, next(iter(self.roles)), "identify", resend=False)

    def await_ready(self) -> None:
        if self.error is not None:
            raise self.error
        while self._starting:
            self.channel.calls.settle(self._starting[0])
            del self._starting[0]

    def send(self, plan: Registration, context: CallContext, arguments: PerRank) -> CallFuture:
        """Sends one message to each rank. The future's `get` raises WorkerError when a rank fails."""
        packer, (positional, named) = ArgumentPacker(self.channel.traffic), arguments
        collectors = plan.mode.collectors(context) if context.only is None else [context.only]
        # The process writes its stacks to the log shortly before the controller gives up, so that the log
        # tail shows them.
        seconds = max(0.1, self.channel.timeouts.call * 0.98 - 0.2)
        everyone = [0] if plan.mode.rank_zero else range(self.world_size)
        ranks = everyone if context.only is None else [context.only]
        calls = {}
        for rank in ranks:
            args = [packer.pack(values[rank]) for values in positional]
            kwargs = {name: packer.pack(values[rank]) for name, values in named.items()}
            calls[rank] = Call(
                context.role,
                context.method,
                args,
                kwargs,
                plan.read_only,
                rank in collectors,
                seconds,
                returns_columns=self.recovery is not None,
            )
        answers: dict[int, Any] = {}
        refs = self._ask(
            lambda rank: self._invoke(rank, calls[rank]),
            ranks,
            context.role,
            context.method,
            answers=answers,
            resend=plan.resend,
            awaits=frozenset(
                receipt
                for values in (*positional, *named.values())
                for value in values
                if isinstance(value, LateShard)
                for receipt in value.receipts
            ),
        )
        collect = partial(plan.mode.collect_fn, context)
        # another call must not depend on an answer that a resend would replace
        joins = plan.mode.joins and self.recovery is None
        return CallFuture(self.channel.calls, self, refs, answers, collectors, collect, joins)

    def _invoke(self, rank: int, call: Call) -> list[ObjectRef]:
        host = self._hosts[rank]
        if not call.returns_columns:
            return [host.invoke.remote(call)]
        return host.invoke_with_columns.options(num_returns=2).remote(call)

    def may_replace(self, call: PendingCall) -> bool:
        """Whether the process that died with this call can be replaced. Not if its machine is lost, because
        the rank's devices were on it. Ray itself may not have noticed that yet."""
        if self.recovery is None or call.attempts >= self.recovery.max_retries:
            return False
        return _is_there(self.processes[call.rank].node_id)

    def replace(self, lost: Sequence[PendingCall], cause: str) -> None:
        """Starts another process for the rank of these calls, restores it and resends them. Raises
        WorkerError when it dies more often than a call may be resent."""
        assert self.recovery is not None, "called although may_replace was False"
        rank, attempts = lost[0].rank, 0
        machine = self.processes[rank].node_id
        while True:
            name = f"{'+'.join(self.roles)} rank {rank} on node {self.rank_infos[rank].node}"
            log.warning("%s is started again: %s", name, cause)
            try:
                self._start_again(rank, self.recovery)
                break
            except ReplacementDied as died:
                self.channel.calls.forget(self, rank)
                attempts, cause = attempts + 1, died.failure.cause
                if attempts >= self.recovery.max_retries or not _is_there(machine):
                    self.channel.calls.forget(self)
                    self.end(died.failure.error)
                    raise died.failure.error from None
        for call in lost:
            if call.again is None:
                call.answers[rank] = None
            else:
                deadline = time.monotonic() + call.seconds
                self._owe(replace(call, deadline=deadline, attempts=call.attempts + 1), call.again())

    def _start_again(self, rank: int, recovery: Recovery) -> None:
        ray.kill(self._hosts[rank])  # it may still run: Ray may only have lost contact with it
        if rank in self.processes:
            self.former = [*self.former, *names_of({rank: self.processes[rank]}, list(self.roles))]
        self._hosts[rank] = self._host(rank)
        self.replaced += 1
        for refs in self._build([rank]):
            self.channel.calls.settle(refs)
        recovery.restore(rank)

    def log_of(self, rank: int, role: str) -> str:
        """Path of a rank's log on its node; empty while unknown."""
        logs = self.channel.observability.logs
        if logs is None:
            return self.processes[rank].log if rank in self.processes else ""
        names = [role] if role in self.roles else list(self.roles)
        files = [path for name in names if (path := Path(logs.folder) / f"{name}-{rank}.log").exists()]
        return str(max(files, key=lambda path: path.stat().st_mtime)) if files else ""

    def end(self, error: HydraflowError) -> None:
        """Kills the processes; every later call raises `error`."""
        self.error = error
        for host in self._hosts:
            ray.kill(host)

    def stop(self) -> None:
        """Shuts the group down cleanly; pending calls are dropped."""
        self.channel.calls.forget(self)
        role, node = ", ".join(self.roles), self.rank_infos[0].node
        cause = "the group was stopped before this call"
        self.end(self.error or WorkerError(role=role, rank=0, node=node, method="stop", cause=cause))

    def mesh(self, role: str, name: str) -> list[Coordinates]:
        if (role, name) not in self._meshes:
            answers: dict[int, Any] = {}
            refs = self._ask(
                lambda rank: [self._hosts[rank].coordinates.remote(role, name)],
                range(self.world_size),
                role,
                f"mesh_coordinates({name!r})",
                answers=answers,
            )
            self.channel.calls.settle(refs)
            self._meshes[role, name] = _checked([answers[rank] for rank in range(self.world_size)], name)
        return self._meshes[role, name]

    def start_profile(self, tool: str, folder: str, ranks: Sequence[int] | None) -> None:
        profile = Profile(tool, folder, "+".join(self.roles))
        self._on(ranks, "start_profile", lambda host: host.start_profile.remote(profile))

    def stop_profile(self, ranks: Sequence[int] | None) -> None:
        self._on(ranks, "stop_profile", lambda host: host.stop_profile.remote())

    def _on(self, ranks: Sequence[int] | None, method: str, ask: Callable[[Any], ObjectRef]) -> None:
        """Sends `ask` to the processes of those ranks (None: all) and waits for them."""
        refs = self._ask(
            lambda rank: [ask(self._hosts[rank])],
            [rank for rank in range(self.world_size) if ranks is None or rank in ranks],
            next(iter(self.roles)),
            method,
            resend=False,
        )
        self.channel.calls.settle(refs)


def _is_there(machine: str) -> bool:
    """Whether the machine, by Ray's id, is in the cluster and its raylet accepts connections."""
    found = [node for node in ray.nodes() if node["NodeID"] == machine and node["Alive"]]
    raylets = [f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}" for node in found]
    return any(not unreachable(raylet, RAYLET_SECONDS) for raylet in raylets)


def _checked(places: list[Coordinates], mesh: str) -> list[Coordinates]:
    sizes = {place.data_size for place in places}
    collecting = sorted(place.data_rank for place in places if place.is_collect)
    known = all(0 <= place.data_rank < place.data_size for place in places)
    if not known or len(sizes) > 1 or collecting != list(range(places[0].data_size)):
        found = f"data sizes {sorted(sizes)}, ranks that collect {collecting}"
        found += "" if known else f", data ranks {sorted({place.data_rank for place in places})}"
        raise ValueError(f"mesh {mesh!r}: {found}; there must be one for each data rank")
    return places


class RoleGroup:
    """The workers of one role, one in each process of the group."""

    def __init__(self, group: Group, name: str):
        self.group = group
        self.name = name

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.group.world_size

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `method`, a function of the role's class declared with `@register`, and returns its result or
        a Future.

        DataProto, RemoteBatch and Future arguments are divided by the method's mode; others go to every rank.
        Raises WorkerError when a rank fails, ValueError when rows do not divide and the method takes no
        padding.
        """
        plan = self._plan(method)
        self.group.await_ready()
        settled = {name: _settled(value) for name, value in kwargs.items()}
        values = [_settled(value) for value in args]
        context = self._announced(method, plan)
        future = self.group.send(plan, context, plan.mode.dispatch_fn(context, *values, **settled))
        return future.get() if plan.blocking else future

    def failed(self, rank: int, method: str, cause: str) -> WorkerError:
        """The error of a call for which the processes of this rank died too often."""
        node = self.group.rank_infos[rank].node if isinstance(self.group, WorkerGroup) else platform.node()
        return WorkerError(role=self.name, rank=rank, node=node, method=method, cause=cause)

    def _plan(self, method: Callable[..., Any]) -> Registration:
        cls = self.group.roles[self.name].cls
        if not any(vars(base).get(method.__name__) is method for base in cls.__mro__):
            text = f"{method.__qualname__} is not a method of {cls.__qualname__}"
            raise TypeError(f"{text}, the class of role {self.name!r}")
        return registration(method)

    def call_rank(self, rank: int, method: Callable[..., Any], *args: Any) -> Future:
        """Calls `method` on one rank with these values; returns a future of a list with its answer."""
        plan = self._plan(method)
        context = self._announced(method, plan, only=rank)
        return self.group.send(plan, context, ([[value] * self.world_size for value in args], {}))

    def _announced(
        self, method: Callable[..., Any], plan: Registration, only: int | None = None
    ) -> CallContext:
        """The context of a call, once `before_call` has agreed to it."""
        if self.group.before_call is not None:
            self.group.before_call(self.name, method.__name__)
        return CallContext(self.group, self.name, method.__name__, plan.padding, only)

    def fetch(self, batch: RemoteBatch, keys: Sequence[str] | None = None) -> DataProto:
        """Reads columns into the controller; None: all."""
        return fetch(batch, keys, self.group.channel)


def _settled(value: Any) -> Any:
    return value.get() if isinstance(value, Future) and not value.joins else value


def fetch(batch: RemoteBatch, keys: Sequence[str] | None, channel: Channel) -> DataProto:
    """Reads columns into the controller, all in one request. Raises WorkerError when the process that holds
    them is found to be dead, LostColumns when they are gone or late for another reason."""
    wait = partial(channel.calls.await_columns, seconds=channel.timeouts.call)
    read = partial(read_columns, traffic=channel.traffic, timeout=FETCH, wait=wait)
    try:
        return materialise(batch, read, keys=keys)
    except LostColumns:
        channel.calls.blame_lost_columns()
        raise
