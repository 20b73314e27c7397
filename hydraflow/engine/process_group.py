"""Joins this process to the group of one role's ranks, and leaves it; and to a group of its own that weights
are broadcast in.

In: rank, number of ranks, address of rank 0. Out: torch.distributed, ready, with a deadline on every
collective. Left out on purpose: choosing addresses and starting processes (`dispatch/`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from hydraflow.device import collective_backend


def start(
    *,
    rank: int,
    world_size: int,
    address: str,
    port: int,
    device_type: str,
    timeout_s: float,
    listen_fd: int | None = None,
    group_size: int | None = None,
) -> None:
    """Waits until all ranks have joined, at most `timeout_s` seconds; a second call in the same process does
    nothing.

    group_size: that many neighbouring ranks are a group without the others; None: all are one. listen_fd: on
    rank 0, a bound socket that has held the port until now; it is taken over. Raises torch's DistStoreError
    or DistNetworkError when the others do not join, and any collective raises after `timeout_s`.
    """
    size = group_size or world_size
    if dist.is_initialized():
        assert (dist.get_rank(), dist.get_world_size()) == (rank % size, size), (
            "a process has one place among its ranks"
        )
        return
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(address, port, world_size, rank == 0, timeout, master_listen_fd=listen_fd)
    dist.init_process_group(
        collective_backend(device_type),
        store=dist.PrefixStore(f"group {rank // size}", store),
        rank=rank % size,
        world_size=size,
        timeout=timeout,
    )


def stop() -> None:
    """Leaves the group, if there is one."""
    if dist.is_initialized():
        host_group.cache_clear()
        dist.destroy_process_group()


@cache
def host_group() -> dist.ProcessGroup | None:
    """A gloo group of all ranks, for work in another thread during training. The first call is collective."""
    return dist.new_group(backend="gloo")


def all_reduce(values: torch.Tensor, how: str = "sum") -> torch.Tensor:
    """Sum or max over all ranks as a new float64 tensor on the CPU."""
    reduced = values.detach().to(device="cpu", dtype=torch.float64, copy=True)
    if dist.get_world_size() > 1:
        dist.all_reduce(reduced, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[how])
    return reduced


JOIN_SECONDS = 60.0
"""For processes that have nothing else to do to join a `BroadcastGroup`."""


class GroupBroken(Exception):
    """Another process of a `BroadcastGroup` has died, or was not there in time."""


class BroadcastGroup:
    """From its first process to all others, beside the groups that each of them is in otherwise.

    address: of the first process's machine, where it listens at `port`; listen_fd: there, a bound socket that
    has held the port until now. own_address: of this machine, for the others to connect to. The constructor
    waits until all have joined, at most `JOIN_SECONDS`. GroupBroken when they do not, and when a broadcast
    takes longer than `timeout_s`.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        address: str,
        port: int,
        own_address: str,
        device: torch.device,
        timeout_s: float,
        listen_fd: int | None = None,
    ):
        self.device = device
        timeout = timedelta(seconds=timeout_s)
        joining = min(timeout, timedelta(seconds=JOIN_SECONDS))
        try:
            self._store = dist.TCPStore(
                address, port, world_size, rank == 0, joining, master_listen_fd=listen_fd
            )
            self._group = _backend(self._store, rank, world_size, own_address, device, timeout)
            self.broadcast(torch.zeros(1, device=device)).wait()  # connects
        except RuntimeError as error:
            raise GroupBroken(str(error)) from error

    def broadcast(self, tensor: torch.Tensor) -> Broadcast:
        """Starts to send the first process's values, or to receive them."""
        try:
            return Broadcast(self._group.broadcast([tensor], dist.BroadcastOptions()), tensor)
        except RuntimeError as error:
            raise GroupBroken(str(error)) from error


@dataclass(frozen=True)
class Broadcast:
    """One that is under way."""

    work: dist.Work
    tensor: torch.Tensor
    """Must not be freed before."""

    def wait(self) -> torch.Tensor:
        """Returns the tensor when it has arrived."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise GroupBroken(str(error)) from error
        return self.tensor


def _backend(
    store: dist.Store, rank: int, world_size: int, own_address: str, device: torch.device, timeout: timedelta
) -> Any:
    if collective_backend(device.type) != "gloo":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world_size, nccl)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
    gloo._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, world_size, gloo)
