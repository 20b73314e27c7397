"""Sender and receiver of a weight broadcast, from the actor's rank 0 to all generation processes.

In: buckets. Out: buckets to load. A bucket's header precedes its bytes. The next one is gathered while a
bucket is sent, so that each side holds two at most. Left out on purpose: the group's membership
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
        """Waits for the receivers to join. Returns False when some do not."""
        listening = self._listener.detach()
        self._group = _joined(
            self.process, self._device, *self.place, rank=0, world_size=world_size, listen_fd=listening
        )
        return self._group is not None

    def send(self, outgoing: Outgoing) -> bool:
        """See `send_all`."""
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
        self._pending = _sent(self._group, FlatBucket.of(header, numbers, self._memory))

    def finish(self) -> None:
        for part in self._pending:
            part.wait()


class WeightsReceiver:
    """The receiver in a generation process."""

    def __init__(self, group: BroadcastGroup):
        self._group = group

    @classmethod
    def join(
        cls,
        process: ProcessContext,
        device: torch.device,
        address: str,
        port: int,
        *,
        number: int,
        world_size: int,
    ) -> WeightsReceiver | None:
        """None: some processes did not join. number: rank of this process in the group, from 1."""
        group = _joined(process, device, address, port, rank=number, world_size=world_size)
        return None if group is None else cls(group)

    def buckets(self) -> Iterator[FlatBucket]:
        """The buckets of one transfer, each valid until the next. Raises GroupBroken."""
        last, memory = False, BucketMemory(self._group.device)
        while not last:
            bucket = self._next(memory)
            last = bucket.header.last
            yield bucket

    def _next(self, memory: BucketMemory) -> FlatBucket:
        device = self._group.device
        [size] = self._group.broadcast(torch.empty(1, dtype=torch.int64, device=device)).wait().tolist()
        text = self._group.broadcast(torch.empty(size, dtype=torch.uint8, device=device)).wait()
        header = Header.from_json(text.cpu().numpy().tobytes())
        return FlatBucket(header, self._group.broadcast(memory.take(flat_size(header))).wait())


def _sent(group: BroadcastGroup, bucket: FlatBucket) -> list[PendingBroadcast]:
    text = torch.from_numpy(np.frombuffer(bucket.header.to_json(), dtype=np.uint8).copy())
    size = torch.tensor([len(text)])
    return [group.broadcast(part.to(group.device)) for part in (size, text, bucket.flat)]


def _joined(
    process: ProcessContext,
    device: torch.device,
    address: str,
    port: int,
    *,
    rank: int,
    world_size: int,
    listen_fd: int | None = None,
) -> BroadcastGroup | None:
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
