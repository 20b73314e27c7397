"""A run in one process, without Ray: the same pools, groups and calls, so that `breakpoint()` and pdb work
anywhere.

In: what `Runtime` takes; every pool has one process. Out: the same results, bit for bit: arguments and
answers are distributed and collected by the same modes and encoded as for the object store, and a method
computes with as many threads as in its own process. A call runs immediately, in the caller's thread, and an
exception reaches the caller unchanged, with its stack. Left out on purpose: several ranks, which wait for
each other and therefore each need a process."""

from __future__ import annotations

import copy
import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch.profiler import record_function

from hydraflow.dispatch.environment import LOOPBACK, settle
from hydraflow.dispatch.group import Channel, Group
from hydraflow.dispatch.modes import CallContext, PerRank, Registration
from hydraflow.dispatch.observability import of_role
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.profiler import Profile
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.shards import CompletedFuture, Shard, is_batch, split
from hydraflow.dispatch.spans import SpanRecorder, record_into, span
from hydraflow.dispatch.stacks import ProcessInfo
from hydraflow.dispatch.worker import ProcessContext, RoleSpec, Worker
from hydraflow.errors import ConfigError
from hydraflow.protocol import wire
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.coordinates import Coordinates
from hydraflow.protocol.pieces import Column, LocalColumn
from hydraflow.protocol.remote import RemoteBatch, materialise
from hydraflow.system.role_logs import log_of_this_process

KEY = "trainer.debug.local"


class LocalRuntime(Runtime):
    """A `Runtime` whose workers are objects of this process."""

    @cached_property
    def _pools(self) -> dict[str, ResourcePool]:
        """The registered pools by name."""
        return {}

    def start(self, pools: Sequence[ResourcePool]) -> None:
        """Registers the pools and sets the workers' environment variables. Raises ConfigError when a pool has
        several processes."""
        for pool in pools:
            if pool.size > 1:
                rule = f"runs in one process, and the pool {pool.name} has {pool.size}"
                remedy = f"trainer.nnodes=1 trainer.n_gpus_per_node=1 or {KEY}=false"
                raise ConfigError.one(KEY, True, rule, remedy)
            self._pools[pool.name] = pool
        settle(0, given=self.ray_init.runtime_env.as_text())

    def group(self, pool: str, roles: Mapping[str, RoleSpec], devices: Sequence[int] | None = None) -> Group:
        """Builds the workers immediately; there is one device."""
        group = LocalGroup(
            self._pools[pool], roles, self.channel, device_type=self.device_type, first=not self.groups
        )
        self.groups.append(group)
        return group

    def stop(self) -> None:
        """Writes the timeline and closes the workers."""
        self._write_timeline(with_ray=False)
        groups, self.groups = self.groups, []
        with ExitStack() as closing:
            for group in reversed(groups):
                closing.callback(group.stop)


class LocalGroup(Group):
    """The workers of one pool: one for each role. Raises what a worker raises while it is built.

    first: the first group of the runtime; the process has one profile, not one per group.
    """

    world_size = 1

    def __init__(
        self,
        pool: ResourcePool,
        roles: Mapping[str, RoleSpec],
        channel: Channel,
        *,
        device_type: str,
        first: bool = True,
    ):
        self.roles, self.channel = dict(roles), channel
        self.processes = {0: ProcessInfo(os.getpid(), "", "", "")}
        self.device_type, self._first = device_type, first
        self._threads = pool.threads
        self._logs = log_of_this_process()
        self._recorder = SpanRecorder()
        self._profile: Profile | None = None
        self.workers: dict[str, Worker] = {}
        listener = socket.create_server((LOOPBACK, 0))
        where = (LOOPBACK, LOOPBACK, listener.getsockname()[1], device_type, channel.timeouts.call)
        process = ProcessContext(
            0, 1, 0, platform.node(), *where, roles=self.workers, listen_fd=listener.detach()
        )
        for name, spec in self.roles.items():
            spec = copy.deepcopy(spec)  # roles must not share arguments: between processes they could not
            with self._as(name), span("start"):
                self.workers[name] = spec.cls(process, *spec.args, **spec.kwargs)

    def await_ready(self) -> None:
        """Returns at once: the workers are already built."""

    def send(self, plan: Registration, context: CallContext, arguments: PerRank) -> CompletedFuture:
        """Runs the call here; exceptions of the method pass through."""
        role, method, (positional, named) = context.role, context.method, arguments
        given = [_given(values[0], plan) for values in positional]
        given_by_name = {name: _given(values[0], plan) for name, values in named.items()}
        with self._as(role), record_function(f"{role}.{method}"):
            started = time.perf_counter()
            with span(method):
                answer = getattr(self.workers[role], method)(*given, **given_by_name)
                self.workers[role].after_call()
            self.channel.traffic.worked[role, 0] += time.perf_counter() - started
        return CompletedFuture(plan.mode.collect_fn(context, [_kept(answer)]))

    def start_profile(self, tool: str, folder: str, ranks: Sequence[int] | None) -> None:
        """Starts a profile of this process, with everything that runs in it."""
        if self._first:
            self._profile = Profile(tool, folder, "all")
            self._profile.start(self.device_type)

    def stop_profile(self, ranks: Sequence[int] | None) -> None:
        if self._profile is not None:
            self._profile.stop(0)
            self._profile = None

    def stop(self) -> None:
        with ExitStack() as closing:  # all, even if one fails
            closing.callback(self.workers.clear)
            for worker in reversed(self.workers.values()):
                closing.callback(worker.close)

    def mesh(self, role: str, name: str) -> list[Coordinates]:
        return [Coordinates(*self.workers[role].mesh_coordinates(name))]

    @contextmanager
    def _as(self, role: str) -> Iterator[None]:
        """Runs its body as that role: with the logs, spans and threads of the role's own process."""
        torch.set_num_threads(self._threads)
        record_into(self._recorder if self.channel.observability.traced else None)
        try:
            with of_role(self._logs, role):
                yield
        finally:
            record_into(None)
            self.channel.timeline.note(role, 0, self._recorder.drain())


def _given(value: Any, plan: Registration) -> Any:
    """An argument as the method gets it."""
    shard = split(value, 1)[0] if is_batch(value) else value
    if not isinstance(shard, Shard):
        return copy.deepcopy(shard)
    batch = materialise(shard.batch, _refuse_remote, copy=not plan.read_only)
    batch.meta_info = copy.deepcopy(batch.meta_info)
    return batch


def _refuse_remote(refs: Sequence[Any]) -> Sequence[wire.ColumnData]:
    raise AssertionError("in a run in one process every column is local")


def _kept(answer: Any) -> Any:
    """An answer as the controller gets it: a copy, as if it had been in the object store."""
    if not isinstance(answer, DataProto):
        return copy.deepcopy(answer)
    columns = {
        name: Column((LocalColumn(wire.decode(wire.encode(column, name))),))
        for name, column in answer.items()
    }
    return RemoteBatch(columns, {}, copy.deepcopy(answer.meta_info))
