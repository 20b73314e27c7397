"""Ray's start and end, and the object through which a trainer reaches pools, groups and columns.

In: the Ray section of the configuration, and resource pools. Out: a `Runtime` with worker groups.
What was started here is ended here: the processes of our groups, and Ray only if we started it.
Left out on purpose: what the groups do.
"""

from __future__ import annotations

import logging
import math
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import ray
from ray._private.services import canonicalize_bootstrap_address
from ray.exceptions import AuthenticationError

from hydraflow.device import usable_cores
from hydraflow.dispatch.cluster import refusal
from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.group import Channel, Group, Limits, WorkerGroup, fetch
from hydraflow.dispatch.head import Head, end_without_head
from hydraflow.dispatch.placement import Reservation, ResourcePool, cpus_needed, release, reserve
from hydraflow.dispatch.stacks import Named, names_of, write_stacks
from hydraflow.dispatch.timeline import Timeline, ray_events
from hydraflow.dispatch.transport import Traffic
from hydraflow.dispatch.watch import Watch
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.errors import ConfigError, after_the_start
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.remote import RemoteBatch
from hydraflow.role_logs import CONTROLLER
from hydraflow.spans import Span, now

log = logging.getLogger(__name__)

PROBE_SECONDS = 5.0
"""How long a cluster's address may take to accept a connection."""


def start_ray(config: RayInitConfig, cpus: float, gpus: int | None = None, *, console: bool = False) -> bool:
    """Starts or joins Ray; True when it is ours to stop. A Ray that this process already uses is used as it is.

    cpus: logical CPUs that the pools need; a local cluster counts at least so many, whatever the machine has.
    gpus: GPUs that a local cluster counts; None: all that Ray finds. console: show here what processes write to Ray's files, of
    equal lines one (RAY_DEDUP_LOGS=0 in the environment shows all). ConfigError when there is no cluster at the address.
    The processes of a local cluster are deaf to SIGUSR1, with which Slurm warns every process of a step: only this one shall act on it.
    """
    if ray.is_initialized():
        return False
    handler = signal.getsignal(signal.SIGTERM)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        _start(config, cpus, gpus, console)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if threading.current_thread() is threading.main_thread():
        # ray.init puts its own handler in place of the one with which a run saves before it ends.
        signal.signal(signal.SIGTERM, handler)
    return True


def _start(config: RayInitConfig, cpus: float, gpus: int | None, console: bool) -> None:
    quiet: dict[str, Any] = dict(include_dashboard=False, log_to_driver=console, logging_level=logging.ERROR)
    if config.address == "local":
        ray.init(address="local", num_cpus=_local_cpus(config, math.ceil(cpus)), num_gpus=gpus, **quiet)
    else:
        _join(config.address, quiet)


def _local_cpus(config: RayInitConfig, needed: int) -> int:
    if config.num_cpus is None:
        return max(usable_cores(), needed)
    if config.num_cpus < needed:
        rule = f"must be at least {needed}, which the worker groups need"
        raise ConfigError.one("ray_init.num_cpus", config.num_cpus, rule, f"ray_init.num_cpus={needed}")
    return config.num_cpus


def require_room(config: RayInitConfig, pools: Sequence[ResourcePool]) -> None:
    """Raises ConfigError when a cluster that the run starts itself could not hold the pools. What another cluster has is known once it
    is joined."""
    if config.address != "local" or ray.is_initialized():
        return
    nodes = max(len(pool.processes_on_nodes) for pool in pools)
    if nodes > 1:
        rule = f"needs {nodes} nodes, and ray_init.address=local starts Ray on this one alone"
        raise ConfigError.one("trainer.nnodes", nodes, rule, "trainer.nnodes=1, or ray_init.address=auto where a Ray cluster is running")
    _local_cpus(config, math.ceil(cpus_needed(pools)))


def _join(address: str, options: dict[str, Any]) -> None:
    try:
        found = _probe(address)
        reason = refusal(found) if found else None
        if reason is None:
            ray.init(address=address, **options)
            return
    except AuthenticationError as error:  # a token is wanted, and its file is not there
        reason = str(error).partition(". ")[0]
    except (OSError, ValueError) as error:
        raise ConfigError.one("ray_init.address", address, f"no Ray cluster answers there: {error}", "ray_init.address=local") from None
    remedy = "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=<the file with the cluster's token> in the environment of this command"
    raise ConfigError.one("ray_init.address", address, f"a Ray cluster answers there, but {reason}", remedy)


def _probe(address: str) -> str | None:
    """The host:port that an address stands for, where somebody listens; None: Ray has to find it. Raises OSError when nobody listens,
    ValueError when it is no address. Ray itself would try for over a minute.

    Ray's own function says what `auto` stands for; RAY_ADDRESS or a file may name a cluster that is gone. A client's address (ray://)
    is that of another service, which cannot be asked whether it takes our token.
    """
    found = canonicalize_bootstrap_address(address.removeprefix("ray://"))
    if found is None:
        return None
    host, _, port = found.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECONDS).close()
    return None if address.startswith("ray://") else found


def stop_ray() -> None:
    """Leaves Ray; a cluster that this process started ends with all its processes."""
    ray.shutdown()


class Runtime:
    """Pools, groups and columns of one run. Also a context manager that stops what it started.

    >>> runtime = Runtime(RayInitConfig(), Limits(start=60, call=600))  # doctest: +SKIP
    >>> runtime.start([ResourcePool("train", [2])])  # doctest: +SKIP
    >>> group = runtime.group("train", {"actor": RoleSpec(ActorWorker, (config,))})  # doctest: +SKIP
    >>> runtime.await_ready()  # doctest: +SKIP
    """

    def __init__(self, ray_init: RayInitConfig, limits: Limits, *, device_type: str = "cpu", watch: Watch | None = None):
        self.ray_init = ray_init
        self.device_type = device_type
        self.timeline = Timeline(ray_init.timeline_file)
        self.watch = replace(watch or Watch(), traced=self.timeline.wanted)
        self.channel = Channel(limits, watch=self.watch, timeline=self.timeline)
        self.groups: list[Group] = []
        self._reservations: dict[str, Reservation] = {}
        self._owns_ray = False
        self._ended: list[Named] = []
        """Processes of groups that were ended."""

    def start(self, pools: Sequence[ResourcePool]) -> None:
        """Starts or joins Ray and reserves the pools. ConfigError naming what the cluster lacks, before any process starts.

        May be called again for more pools; a local cluster counts its CPUs at the first call.
        """
        console = self.watch.logs is not None and self.watch.logs.console is not None
        self._owns_ray = start_ray(self.ray_init, cpus_needed(pools), console=console) or self._owns_ray
        self.channel.ledger.stacks = self._write_stacks
        self.channel.ledger.head = self.channel.ledger.head or Head.of_this_process()
        growing = self.ray_init.address != "local"
        with after_the_start():
            self._reservations |= reserve(pools, timeout=self.channel.limits.start, growing=growing)

    def group(self, pool: str, roles: Mapping[str, RoleSpec]) -> Group:
        """A group in a reserved pool; its processes start while the caller goes on (`await_ready`)."""
        env_vars = self.ray_init.runtime_env.as_text()
        self.groups.append(WorkerGroup(self._reservations[pool], roles, self.channel, device_type=self.device_type, env_vars=env_vars))
        return self.groups[-1]

    def await_ready(self) -> None:
        """Waits until the workers of all groups are built. ConfigError or WorkerError when one cannot be, as in `WorkerGroup`."""
        start = now()
        for group in self.groups:
            group.await_ready()
        self.timeline.note(CONTROLLER, 0, [Span("start workers", start, now() - start)])

    def end(self, group: Group) -> None:
        """Ends one group and makes room in its pool."""
        self._ended += names_of(group.processes, list(group.roles))
        group.stop()
        self.groups.remove(group)

    def fetch(self, batch: RemoteBatch, keys: Sequence[str] | None = None) -> DataProto:
        """Reads columns into the controller, all in one request; None: all columns."""
        return fetch(batch, keys, self.channel)

    def traffic(self) -> Traffic:
        """Calls and bytes through the controller so far; subtract two to get those between."""
        return replace(self.channel.traffic)

    @contextmanager
    def profiled(self, step: int) -> Iterator[None]:
        """Its body is training step `step`, which is profiled if `global_profiler` asks for it."""
        profiler = self.watch.profiler
        if profiler is None or profiler.tool is None or step not in (profiler.steps or ()):
            yield
            return
        folder, ranks = f"{self.watch.profiles}/step_{step}", profiler.ranks
        groups = [group for group in self.groups if ranks is None or min(ranks) < group.world_size]
        if not groups:
            log.warning("step %d is not profiled: global_profiler.ranks=%s, and no worker group has such a rank", step, ranks)
        for group in groups:
            group.start_profile(profiler.tool, folder, ranks)
        yield
        for group in groups:
            group.stop_profile(ranks)
        if not groups:
            return
        log.info("profile of step %d: %s", step, folder)

    def stop(self) -> None:
        """Writes the timeline, ends all groups, gives the pools back and, if Ray was started here, ends Ray. May be called twice."""
        gone = self.channel.ledger.head is not None and self.channel.ledger.head.is_gone
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

    def _processes(self) -> list[Named]:
        return [process for group in self.groups for process in names_of(group.processes, list(group.roles))]

    def _write_stacks(self, why: str) -> str:
        return write_stacks(self.watch.stacks_folder(), why, self._processes())

    def _write_timeline(self, *, with_ray: bool) -> None:
        if not self.timeline.wanted:
            return
        workers = {process.facts.worker_id: process.name for process in [*self._ended, *self._processes()]}
        self.timeline.write(ray_events() if with_ray else [], workers)
        self.timeline.path = None  # a second call of `stop` has nothing to add

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
