"""A process group for broadcasts from one process, separate from the processes' other groups.

In: addresses. Out: broadcasts of tensors, by gloo in host memory or NCCL on GPUs (`device.py` decides). When
a process dies or times out, the others get an error and their own state is intact. Left out on purpose: what
is sent (`workers/weights_broadcast.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hydraflow.device import broadcast_backend, errors_reach_the_caller
from hydraflow.weights.connection import CONNECT_SECONDS


class GroupBroken(Exception):
    """A peer has died or timed out."""


@dataclass(frozen=True)
class PendingBroadcast:
    """A broadcast in progress."""

    work: dist.Work
    tensor: torch.Tensor
    """Must stay alive until the broadcast ends."""
    within: timedelta

    def wait(self) -> torch.Tensor:
        """Returns the tensor once it has been sent, or has arrived."""
        try:
            self.work.wait(self.within)
        except RuntimeError as error:
            raise GroupBroken(str(error)) from error
        return self.tensor


class BroadcastGroup:
    """Process 0 sends, the others receive. device: where the tensors are.

    address, port: where process 0 listens; listen_fd: in process 0, the bound socket that reserved the port.
    own_address: this machine's address, to which the others connect. The constructor waits until all have
    joined, at most `CONNECT_SECONDS`. Raises GroupBroken when they do not join, and when a broadcast takes
    longer than `timeout_s`.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        rank: int,
        world_size: int,
        address: str,
        port: int,
        own_address: str,
        timeout_s: float,
        listen_fd: int | None = None,
    ):
        self.device = device
        joining = timedelta(seconds=min(timeout_s, CONNECT_SECONDS))
        try:
            self._store = dist.TCPStore(
                address, port, world_size, rank == 0, joining, master_listen_fd=listen_fd
            )
            if broadcast_backend(device.type) == "nccl":
                self._group = _nccl(self._store, rank, world_size, joining)
            else:
                self._group = _gloo(self._store, rank, world_size, joining, own_address)
        except RuntimeError as error:
            raise GroupBroken(str(error)) from error
        self._timeout = joining
        # backends connect lazily, at the first broadcast
        self.broadcast(torch.zeros(1, device=device)).wait()
        self._timeout = timedelta(seconds=timeout_s)

    def broadcast(self, tensor: torch.Tensor) -> PendingBroadcast:
        """Starts sending the tensor, or receiving into it."""
        options = dist.BroadcastOptions()
        options.timeout = self._timeout
        try:
            work = self._group.broadcast([tensor], options)
            return PendingBroadcast(work, tensor, self._timeout)
        except RuntimeError as error:
            raise GroupBroken(str(error)) from error


def _gloo(store: dist.Store, rank: int, world_size: int, joining: timedelta, own_address: str) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
    options._timeout = joining
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def _nccl(store: dist.Store, rank: int, world_size: int, joining: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = joining
    with errors_reach_the_caller():
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
