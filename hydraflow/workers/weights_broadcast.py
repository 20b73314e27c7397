"""Sender and receiver of a weight broadcast, from the actor's rank 0 to all generation processes.

In: buckets. Out: buckets to load. A bucket's header precedes its bytes. The next one is gathered while a
bucket is sent, so each side holds at most two. Left out on purpose: the group's membership
(`trainer/weight_links.py`).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from hydraflow.dispatch.worker import ProcessContext
from hydraflow.engine.broadcast_group import BroadcastGroup, GroupBroken, PendingBroadcast
from hydraflow.weights.buckets import BucketMemory, FlatBucket, Header, flat_size
from hydraflow.workers.weights_transfer import WAIT_SHARE, Outgoing, send_all

log = logging.getLogger(__name__)


class WeightsSender:
    """The sender on the actor's rank 0. The constructor opens a port."""

    def __init__(self, process: ProcessContext, device: torch.device):
        self.process, self._device = process, device
        family = socket.AF_INET6 if ":" in process.address else socket.AF_INET
        self._listener = socket.create_server((process.address, 0), family=family, backlog=1024)
        self.place = process.address, self._listener.getsockname()[1]
        self._group: BroadcastGroup | None = None

    def join(self, world_size: int) -> bool:
        """Waits for the receivers to join; returns whether all have."""
        listening = self._listener.detach()
        self._group = joined(
            self.process, self._device, *self.place, rank=0, world_size=world_size, listen_fd=listening
        )
        return self._group is not None

    def send(self, outgoing: Outgoing) -> bool:
        outlet = None if self._group is None else _Broadcasts(self._group, self._device)
        if not (whole := send_all(outgoing, outlet)):
            self._group = None
        return whole


class _Broadcasts:
    """An `Outlet`: while a bucket is sent, the next one is gathered."""

    def __init__(self, group: BroadcastGroup, device: torch.device):
        self._group, self._memory = group, BucketMemory(device)
        self._pending: list[PendingBroadcast] = []

    def send(self, header: Header, numbers: Sequence[torch.Tensor]) -> None:
        self.finish()
        bucket = FlatBucket.of(header, numbers, self._memory)
        text = torch.from_numpy(np.frombuffer(header.to_json(), dtype=np.uint8).copy())
        parts = torch.tensor([len(text)]), text, bucket.flat
        self._pending = [self._group.broadcast(part.to(self._group.device)) for part in parts]

    def finish(self) -> None:
        for part in self._pending:
            part.wait()


def received_buckets(group: BroadcastGroup) -> Iterator[FlatBucket]:
    """In a generation process: the buckets of one transfer, each valid until the next. Raises GroupBroken."""
    last, memory, device = False, BucketMemory(group.device), group.device
    while not last:
        [size] = group.broadcast(torch.empty(1, dtype=torch.int64, device=device)).wait().tolist()
        text = group.broadcast(torch.empty(size, dtype=torch.uint8, device=device)).wait()
        header = Header.from_json(text.cpu().numpy().tobytes())
        last = header.last
        yield FlatBucket(header, group.broadcast(memory.take(flat_size(header))).wait())


def joined(
    process: ProcessContext,
    device: torch.device,
    address: str,
    port: int,
    *,
    rank: int,
    world_size: int,
    listen_fd: int | None = None,
) -> BroadcastGroup | None:
    """Joins, as member `rank`, the group of the actor's rank 0, which listens at that address, and all
    receivers. None: some processes did not join."""
    try:
        return BroadcastGroup(
            device,
            rank=rank,
            world_size=world_size,
            address=address,
            port=port,
            own_address=process.address,
            timeout_s=WAIT_SHARE * process.timeout_s,
            listen_fd=listen_fd,
        )
    except GroupBroken as error:
        log.warning("not all processes joined the weights group: %s", error)
        return None
