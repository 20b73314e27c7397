"""A worker group: one process per rank, several roles in each process, and the controller's calls to them.

In: a reservation and the roles. Out: results of calls; batches come back as references (`RemoteBatch`).
A call is made by naming the method: `actors.call(ActorWorker.update, batch)`.
After a failure the processes are ended and the group refuses further calls with the first cause.
Left out on purpose: how arguments are distributed (`modes`), waiting and failure (`future`).
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef

from hydraflow.dispatch.future import CallDuration, CallFuture, PendingCall, PendingCalls
from hydraflow.dispatch.host import WorkerHost
from hydraflow.dispatch.modes import CallContext, Coordinates, Registration, registration
from hydraflow.dispatch.observability import Observability
from hydraflow.dispatch.placement import Reservation
from hydraflow.dispatch.profile import Profile
from hydraflow.dispatch.profiler import nsight_options
from hydraflow.dispatch.shards import Future
from hydraflow.dispatch.stacks import ProcessInfo
from hydraflow.dispatch.timeline import Timeline
from hydraflow.dispatch.transport import ArgumentPacker, Traffic, read_columns
from hydraflow.dispatch.worker import Call, RoleSpec
from hydraflow.errors import HydraflowError, WorkerError
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.remote import RemoteBatch, materialise

WORKER_PROCESS = "worker process"


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of the controller, in seconds."""

    start: float = 300.0
    """For processes to start and build their roles."""
    call: float = 3600.0
    """For any one call."""


@dataclass
class Channel:
    """Shared by all groups of a runtime: pending calls, byte counts, timeouts and observability."""

    timeouts: Timeouts = field(default_factory=Timeouts)
    traffic: Traffic = field(default_factory=Traffic)
    observability: Observability = field(default_factory=Observability)
    timeline: Timeline = field(default_factory=Timeline)

    def __post_init__(self) -> None:
        self.calls = PendingCalls(self.traffic, self.timeline)


class Group(ABC):
    """Workers that hold the same roles, wherever they run."""

    roles: dict[str, RoleSpec]
    channel: Channel
    processes: dict[int, ProcessInfo]
    """The processes that have reported where they run, by rank."""

    world_size: int
    """Number of ranks."""

    @abstractmethod
    def await_ready(self) -> None:
        """Waits until all workers are built. ConfigError when one finds a user error, WorkerError when
        it fails otherwise."""

    @abstractmethod
    def mesh(self, role: str, name: str) -> list[Coordinates]:
        """Coordinates of all ranks in a mesh. ValueError when they are inconsistent."""

    @abstractmethod
    def send(
        self,
        plan: Registration,
        context: CallContext,
        positional: Sequence[Sequence[Any]],
        named: Mapping[str, Sequence[Any]],
    ) -> Future:
        """Makes a call whose arguments are divided by rank."""

    def perform(
        self, role: str, method: str, plan: Registration, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Makes a call as declared by `@register`; returns its result or a future. ValueError when rows do
        not divide and the method takes no padding."""
        self.await_ready()
        context = CallContext(self, role, method, plan.padding)
        settled = {name: _settled(value) for name, value in kwargs.items()}
        positional, named = plan.mode.dispatch_fn(context, *map(_settled, args), **settled)
        future = self.send(plan, context, positional, named)
        return future.get() if plan.blocking else future

    @abstractmethod
    def start_profile(self, tool: str, folder: str, ranks: Sequence[int] | None) -> None:
        """Starts a profile in the processes of those ranks; None: all. WorkerError when one fails."""

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
        self.error: HydraflowError | None = None
        self._meshes: dict[tuple[str, str], list[Coordinates]] = {}
        host: Any = ray.remote(WorkerHost)
        observability, first_role = channel.observability, next(iter(roles))
        limits = (reservation.pool.threads, channel.timeouts.call)
        settings = (env_vars or {}, device_type, *limits, sys.path, observability, first_role)
        self._hosts: list[Any] = []
        for rank_info in self.rank_infos:
            nsight = nsight_options(observability, "+".join(roles), rank_info.rank, device_type)
            options = reservation.actor_options(rank_info.rank, observability.environment(), nsight)
            self._hosts.append(host.options(**options).remote(rank_info, *settings))
        self.processes = {}
        self._starting = self._build()
        self._ready = False

    def _build(self) -> list[ObjectRef]:
        identified = {rank: host.identify.remote() for rank, host in enumerate(self._hosts)}
        rendezvous = self._hosts[0].rendezvous.remote()
        roles = ArgumentPacker(self.channel.traffic).pack(self.roles)
        built = {rank: host.build.remote(roles, rendezvous) for rank, host in enumerate(self._hosts)}
        self._owe(identified, WORKER_PROCESS, "__init__", self.channel.timeouts.start, self.processes)
        self._owe(built, WORKER_PROCESS, "__init__", self.channel.timeouts.start, {})
        return [*identified.values(), *built.values()]

    def _owe(
        self, refs: Mapping[int, ObjectRef], role: str, method: str, seconds: float, answers: dict[int, Any]
    ) -> None:
        deadline, duration = time.monotonic() + seconds, CallDuration()
        for rank, ref in refs.items():
            what = (role, rank, self.rank_infos[rank].node, method)
            call = PendingCall(self, *what, seconds, deadline, answers, duration)
            self.channel.calls.pending[ref] = call

    def await_ready(self) -> None:
        if self.error is not None:
            raise self.error
        if not self._ready:
            self.channel.calls.settle(self._starting)
            self._ready = True

    def send(
        self,
        plan: Registration,
        context: CallContext,
        positional: Sequence[Sequence[Any]],
        named: Mapping[str, Sequence[Any]],
    ) -> CallFuture:
        """Sends one message to each rank. The future's `get` raises WorkerError when a rank fails."""
        packer = ArgumentPacker(self.channel.traffic)
        collectors = plan.mode.collectors(context)
        # The process writes its stacks to the log shortly before the controller gives up, so that the log
        # tail shows them.
        seconds = max(0.1, self.channel.timeouts.call * 0.98 - 0.2)
        refs = {}
        for rank in [0] if plan.mode.rank_zero else range(self.world_size):
            args = [packer.pack(values[rank]) for values in positional]
            kwargs = {name: packer.pack(values[rank]) for name, values in named.items()}
            used = rank in collectors
            call = Call(context.role, context.method, args, kwargs, plan.read_only, used, seconds)
            refs[rank] = self._hosts[rank].invoke.remote(call)
        self.channel.traffic.calls += 1
        answers: dict[int, Any] = {}
        self._owe(refs, context.role, context.method, self.channel.timeouts.call, answers)
        collect = partial(plan.mode.collect_fn, context)
        return CallFuture(self.channel.calls, self, refs, answers, collectors, collect, plan.mode.joins)

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
            refs = {rank: host.coordinates.remote(role, name) for rank, host in enumerate(self._hosts)}
            self._owe(refs, role, f"mesh_coordinates({name!r})", self.channel.timeouts.call, answers)
            self.channel.calls.settle(list(refs.values()))
            self._meshes[role, name] = _checked([answers[rank] for rank in range(self.world_size)], name)
        return self._meshes[role, name]

    def start_profile(self, tool: str, folder: str, ranks: Sequence[int] | None) -> None:
        profile = Profile(tool, folder, "+".join(self.roles))
        self._on(ranks, "start_profile", lambda host: host.start_profile.remote(profile))

    def stop_profile(self, ranks: Sequence[int] | None) -> None:
        self._on(ranks, "stop_profile", lambda host: host.stop_profile.remote())

    def _on(self, ranks: Sequence[int] | None, method: str, ask: Callable[[Any], ObjectRef]) -> None:
        refs = {rank: ask(host) for rank, host in enumerate(self._hosts) if ranks is None or rank in ranks}
        self._owe(refs, next(iter(self.roles)), method, self.channel.timeouts.call, {})
        self.channel.calls.settle(list(refs.values()))


def _checked(places: list[Coordinates], mesh: str) -> list[Coordinates]:
    sizes = {place.data_size for place in places}
    collecting = sorted(place.data_rank for place in places if place.is_collect)
    if len(sizes) > 1 or collecting != list(range(places[0].data_size)):
        found = f"data sizes {sorted(sizes)}, ranks that collect {collecting}"
        raise ValueError(f"mesh {mesh!r}: {found}; one for each data rank is needed")
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
        WorkerError when a rank fails; ValueError when rows do not divide and the method takes no padding.
        """
        return self.group.perform(self.name, method.__name__, self._plan(method), args, kwargs)

    def _plan(self, method: Callable[..., Any]) -> Registration:
        cls = self.group.roles[self.name].cls
        if not any(vars(base).get(method.__name__) is method for base in cls.__mro__):
            text = f"{method.__qualname__} is no method of {cls.__qualname__}"
            raise TypeError(f"{text}, the class of role {self.name!r}")
        return registration(method)

    def fetch(self, batch: RemoteBatch, keys: Sequence[str] | None = None) -> DataProto:
        """Reads columns into the controller; None: all."""
        return fetch(batch, keys, self.group.channel)


def _settled(value: Any) -> Any:
    return value.get() if isinstance(value, Future) and not value.joins else value


def fetch(batch: RemoteBatch, keys: Sequence[str] | None, channel: Channel) -> DataProto:
    """Reads columns into the controller, all in one request. EnvironmentFault when they are gone or late."""
    read = partial(read_columns, traffic=channel.traffic, timeout=channel.timeouts.call)
    return materialise(batch, read, keys=keys)
