"""The two sides of a broadcast of weights, from the actor's rank 0 to all generation processes.

In: buckets, as they are made. Out: buckets to load. A bucket's header goes before its bytes. The next one
is gathered while a bucket is sent, so that each side holds two at most. Where another process has died or is
late, both sides end with False and their own state is unharmed; the controller finds out who it was. Left out
on purpose: who joins when (`trainer/weight_links.py`).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from hydraflow.dispatch.worker import ProcessContext
from hydraflow.engine.broadcast_group import BroadcastGroup, GroupBroken, PendingBroadcast
from hydraflow.weights.buckets import BucketMemory, FlatBucket, Header, flat_size

log = logging.getLogger(__name__)
WAIT_SHARE = 0.5
"""Share of a call's timeout that a process waits for others, so that those that answer do so before the
controller looks for the one that does not."""


class WeightsSender:
    """On the actor's rank 0. The constructor opens a port."""

    def __init__(self, process: ProcessContext):
        self.process = process
        family = socket.AF_INET6 if ":" in process.address else socket.AF_INET
        self._listener = socket.create_server((process.address, 0), family=family, backlog=1024)
        self.place = process.address, self._listener.getsockname()[1]
        self._group: BroadcastGroup | None = None

    def join(self, world_size: int) -> bool:
        """Waits for the receivers to join. Returns False when some do not."""
        self._group = _joined(
            self.process, *self.place, rank=0, world_size=world_size, listen_fd=self._listener.detach()
        )
        return self._group is not None

    def send(self, outgoing: Iterable[tuple[Header | None, list[torch.Tensor]]]) -> bool:
        """Sends buckets as `cut` makes them. Returns False when some could not be sent; they are exhausted in
        any case, because other ranks take part in making them."""
        under_way, memory = list[PendingBroadcast](), BucketMemory()
        for header, numbers in outgoing:
            assert header is not None, "rank 0 sends"
            under_way = self._attempt(under_way, memory, header, numbers)
            numbers.clear()  # while the next bucket is gathered
        self._attempt(under_way, memory)
        return self._group is not None

    def _attempt(
        self,
        before: list[PendingBroadcast],
        memory: BucketMemory,
        header: Header | None = None,
        numbers: Sequence[torch.Tensor] = (),
    ) -> list[PendingBroadcast]:
        """Waits for one bucket, then starts to send the next."""
        if self._group is None:
            return []
        try:
            for part in before:
                part.wait()
            return [] if header is None else _sent(self._group, FlatBucket.of(header, numbers, memory))
        except GroupBroken as error:
            log.warning("weights could not be sent: %s", error)
            self._group = None
            return []


class WeightsReceiver:
    """In a generation process."""

    def __init__(self, group: BroadcastGroup):
        self._group = group

    @classmethod
    def join(
        cls, process: ProcessContext, address: str, port: int, world_size: int
    ) -> WeightsReceiver | None:
        """None: not all have come."""
        group = _joined(process, address, port, rank=1 + process.rank, world_size=world_size)
        return None if group is None else cls(group)

    def receive(self, load: Callable[[FlatBucket], None]) -> bool:
        """Calls `load` with each bucket. Returns False when some have not arrived."""
        last, memory = False, BucketMemory()
        while not last:
            try:
                bucket = self._next(memory)
            except GroupBroken as error:
                log.warning("weights were not received: %s", error)
                return False
            last = bucket.header.last
            load(bucket)
        return True

    def _next(self, memory: BucketMemory) -> FlatBucket:
        [size] = self._group.broadcast(torch.empty(1, dtype=torch.int64)).wait().tolist()
        text = self._group.broadcast(torch.empty(size, dtype=torch.uint8)).wait()
        header = Header.from_json(text.numpy().tobytes())
        return FlatBucket(header, self._group.broadcast(memory.take(flat_size(header))).wait())


def _sent(group: BroadcastGroup, bucket: FlatBucket) -> list[PendingBroadcast]:
    text = torch.from_numpy(np.frombuffer(bucket.header.to_json(), dtype=np.uint8).copy())
    return [group.broadcast(part) for part in (torch.tensor([len(text)]), text, bucket.flat)]


def _joined(
    process: ProcessContext,
    address: str,
    port: int,
    *,
    rank: int,
    world_size: int,
    listen_fd: int | None = None,
) -> BroadcastGroup | None:
    try:
        return BroadcastGroup(
            rank=rank,
            world_size=world_size,
            address=address,
            port=port,
            own_address=process.address,
            timeout_s=WAIT_SHARE * process.timeout_s,
            listen_fd=listen_fd,
        )
    except GroupBroken as error:
        log.warning("the group for weights was not joined by all: %s", error)
        return None
