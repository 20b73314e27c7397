"""Ray's start and end, and the object through which a trainer reaches pools, groups and columns.

In: the Ray section of the configuration, and resource pools. Out: a `Runtime` with worker groups.
What was started here is ended here: the processes of our groups, and Ray only if we started it.
Left out on purpose: what the groups do.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import ray

from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.group import Channel, Group, Timeouts, WorkerGroup, fetch
from hydraflow.dispatch.guard import RayGuard
from hydraflow.dispatch.head import RayHead, end_without_head
from hydraflow.dispatch.observability import Observability
from hydraflow.dispatch.placement import Reservation, ResourcePool, cpus_needed, release, reserve
from hydraflow.dispatch.processes import end_processes
from hydraflow.dispatch.spans import Span, now
from hydraflow.dispatch.stacks import NamedProcess, names_of, write_stacks
from hydraflow.dispatch.start import start_ray, stop_ray
from hydraflow.dispatch.template import end_template, forked_workers, stop_forking
from hydraflow.dispatch.timeline import Timeline, ray_events
from hydraflow.dispatch.transport import Traffic
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.errors import EnvironmentFault, HydraflowError, after_the_start, first_line
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.remote import RemoteBatch
from hydraflow.system.interrupts import ending
from hydraflow.system.role_logs import CONTROLLER

log = logging.getLogger(__name__)
ALL_JOINED = "HYDRAFLOW_ALL_NODES_JOINED"
"""Set by `scripts/slurm/train.sh`: the cluster has all nodes that it will ever have."""


class Runtime:
    """Pools, groups and columns of one run. Also a context manager that stops what it started.

    >>> runtime = Runtime(RayInitConfig(), Timeouts(start=60, call=600))  # doctest: +SKIP
    >>> runtime.start([ResourcePool("train", [2])])  # doctest: +SKIP
    >>> group = runtime.group("train", {"actor": RoleSpec(ActorWorker, (config,))})  # doctest: +SKIP
    >>> runtime.await_ready()  # doctest: +SKIP
    """

    def __init__(
        self,
        ray_init: RayInitConfig,
        timeouts: Timeouts,
        *,
        device_type: str = "cpu",
        observability: Observability | None = None,
    ):
        self.ray_init = ray_init
        self.device_type = device_type
        self.timeline = Timeline(ray_init.timeline_file)
        self.observability = replace(observability or Observability(), traced=self.timeline.wanted)
        self.channel = Channel(timeouts, observability=self.observability, timeline=self.timeline)
        self.channel.calls.ask_idle = self._ask_idle
        self.groups: list[Group] = []
        self._reservations: dict[str, Reservation] = {}
        self._owns_ray = False
        self._guard: RayGuard | None = None
        """The local cluster's guard; None for a joined cluster."""
        self._ended: list[NamedProcess] = []
        """Processes of groups that have ended."""

    def start(self, pools: Sequence[ResourcePool]) -> None:
        """Starts or joins Ray and reserves the pools. Raises ConfigError naming what the cluster lacks,
        before any process starts, and EnvironmentFault when Ray does not come up. A Ray that it started is
        shut down then.

        May be called again for more pools; a local cluster counts its CPUs at the first call.
        """
        if self.ray_init.address == "local" and not ray.is_initialized():
            self._guard = RayGuard()
            self._guard.watch()
        try:
            self._start(pools)
        except BaseException as error:
            fault = self.fault_behind(error)
            self._abandon()
            if fault is not None:
                raise fault from error
            if isinstance(error, HydraflowError) or not isinstance(error, Exception):
                raise
            # Ray raises RuntimeError, OSError, its own errors and plain Exception when one of its
            # processes fails to start
            first = first_line(error)
            raise EnvironmentFault(f"Ray could not be started: {first}") from error
        if self._guard is not None:
            self._guard.started()

    def _start(self, pools: Sequence[ResourcePool]) -> None:
        logs = self.observability.logs
        console = logs is not None and logs.log.console is not None
        forks = self.device_type == "cpu"
        started = start_ray(self.ray_init, cpus_needed(pools), console=console, forks=forks)
        self._owns_ray = started or self._owns_ray
        self.channel.calls.stacks = self._write_stacks
        if self.channel.calls.head is None:
            fault = None if self._guard is None else self._guard.fault
            self.channel.calls.head = RayHead(ray.get_runtime_context().gcs_address, fault)
        growing = self.ray_init.address != "local" and ALL_JOINED not in os.environ
        with after_the_start():
            self._reservations |= reserve(pools, timeout=self.channel.timeouts.start, growing=growing)

    def fault_behind(self, error: BaseException | None) -> EnvironmentFault | None:
        """The fault behind an internal error: one of Ray's processes has ended. None: the error already has a
        message for the user, or all of this run's own Ray processes are alive."""
        if self._guard is None or not isinstance(error, Exception) or isinstance(error, HydraflowError):
            return None
        return self._guard.fault()

    def _abandon(self) -> None:
        """Shuts down a Ray that failed to start."""
        if ray.is_initialized():
            self.stop()
        if self._guard is not None:
            self._guard.stop()
            stop_forking()
            end_processes([*forked_workers(), *self._guard.children()], grace=0.0)
            end_template()

    def group(self, pool: str, roles: Mapping[str, RoleSpec], devices: Sequence[int] | None = None) -> Group:
        """A group with a process on each device of a reserved pool, or on each of `devices`; they start in
        the background (`await_ready` waits for them)."""
        place = self._reservations[pool]
        group = WorkerGroup(
            place if devices is None else place.part(devices),
            roles,
            self.channel,
            device_type=self.device_type,
            env_vars=self.ray_init.runtime_env.as_text(),
        )
        self.groups.append(group)
        return group

    def _ask_idle(self) -> None:
        for group in self.groups:
            if isinstance(group, WorkerGroup) and group.error is None:
                group.ask_idle()

    def await_ready(self) -> None:
        """Waits until the workers of all groups are built. Raises ConfigError or WorkerError when one fails,
        as in `WorkerGroup`."""
        start = now()
        for group in self.groups:
            group.await_ready()
        self.timeline.note(CONTROLLER, 0, [Span("start workers", start, now() - start)])

    def end(self, group: Group) -> None:
        """Ends one group and frees its place in the pool."""
        self._ended += [*group.former, *names_of(group.processes, list(group.roles))]
        group.stop()
        self.groups.remove(group)

    def fetch(self, batch: RemoteBatch, keys: Sequence[str] | None = None) -> DataProto:
        """Reads columns into the controller, all in one request; None: all columns."""
        return fetch(batch, keys, self.channel)

    def traffic(self) -> Traffic:
        """What `Traffic` counts, so far; subtract two snapshots for an interval."""
        traffic = self.channel.traffic
        return replace(traffic, worked=traffic.worked.copy())

    @contextmanager
    def interruptible(self, check: Callable[[], None]) -> Iterator[None]:
        """In its body every wait for worker processes calls `check` a few times a second; an exception from
        it ends the wait.

        The awaited calls stay pending.
        """
        self.channel.calls.interrupt = check
        try:
            yield
        finally:
            self.channel.calls.interrupt = None

    @contextmanager
    def profiled(self, step: int) -> Iterator[None]:
        """Wraps training step `step`; profiles it if `global_profiler` selects it."""
        profiler = self.observability.profiler
        if profiler is None or profiler.tool is None or step not in (profiler.steps or ()):
            yield
            return
        folder, ranks = f"{self.observability.profiles}/step_{step}", profiler.ranks
        groups = [group for group in self.groups if ranks is None or min(ranks) < group.world_size]
        if not groups:
            text = "step %d is not profiled: global_profiler.ranks=%s, and no worker group has such a rank"
            log.warning(text, step, ranks)
        for group in groups:
            group.start_profile(profiler.tool, folder, ranks)
        yield
        for group in groups:
            group.stop_profile(ranks)
        if groups:
            log.info("profile of step %d: %s", step, folder)

    def stop(self) -> None:
        """Writes the timeline, ends all groups, releases the pools and, if Ray was started here, ends Ray.
        May be called twice."""
        with ending(sys.exc_info()[1]):
            self._stop()

    def _stop(self) -> None:
        lost = self._guard.fault() if self._guard is not None else None
        gone = lost is not None or (self.channel.calls.head is not None and self.channel.calls.head.is_gone)
        if self._guard is not None:
            self._guard.stop()
        self._write_timeline(with_ray=ray.is_initialized() and not gone)
        if not ray.is_initialized():
            return
        if gone:
            end_without_head()
            return
        for group in self.groups:
            group.stop()
        release(list(self._reservations.values()))
        self.groups, self._reservations = [], {}
        if self._owns_ray:
            stop_ray()

    def _processes(self) -> list[NamedProcess]:
        return [process for group in self.groups for process in names_of(group.processes, list(group.roles))]

    def _write_stacks(self, why: str) -> str:
        return write_stacks(self.observability.stacks_folder(), why, self._processes())

    def _write_timeline(self, *, with_ray: bool) -> None:
        if not self.timeline.wanted:
            return
        former = [process for group in self.groups for process in group.former]
        known = [*self._ended, *former, *self._processes()]
        workers = {process.facts.worker_id: process.name for process in known}
        self.timeline.write(ray_events() if with_ray else [], workers)
        self.timeline.path = None  # a second call of `stop` writes nothing

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        fault = self.fault_behind(error)
        self.stop()
        if fault is not None:
            raise fault from error
