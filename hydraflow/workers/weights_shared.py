"""Sender and receiver of a weight transfer on one node, from the actor's rank 0 to all generation processes:
bytes are in two shared-memory slots, and a connection to each receiver synchronises access to them.

In: buckets. Out: buckets to load. The sender refills a slot once every receiver has acknowledged its previous
bucket, so one bucket is loaded while the next is filled. Left out on purpose: the memory (`weights/slots.py`)
and the connections (`weights/connection.py`).
"""

from __future__ import annotations

import pickle
from collections.abc import Generator, Sequence

import torch

from hydraflow.device import return_memory
from hydraflow.weights.buckets import FlatBucket, Header
from hydraflow.weights.connection import Connection, Listener, connect
from hydraflow.weights.slots import SLOTS, DevicePlace, OpenSlots, SentBucket, Slots

READ = b"read"
"""Acknowledgement of a bucket."""


class SlotOutlet:
    """An `Outlet` on the actor's rank 0. receivers: ranks of generation processes, which connect to the
    listener. seconds: timeout per message."""

    def __init__(self, slots: Slots, listener: Listener, receivers: Sequence[int], seconds: float):
        self._slots, self._listener, self._receivers, self._seconds = slots, listener, receivers, seconds
        self._connections: list[Connection] = []
        self._unread = 0
        """Buckets that some receiver may still be reading."""

    def send(self, header: Header, numbers: Sequence[torch.Tensor]) -> None:
        self._await(SLOTS - 1)
        sent = pickle.dumps(self._slots.put(header, numbers))
        self._connections = self._connections or self._listener.accept(self._receivers, self._seconds)
        for connection in self._connections:
            connection.send(sent)
        self._unread += 1

    def finish(self) -> None:
        self._await(0)

    def close(self) -> None:
        """Disconnects all receivers, including those that are still waiting."""
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _await(self, most: int) -> None:
        """Waits until at most `most` buckets are unread."""
        while self._unread > most:
            for connection in self._connections:
                connection.receive()
            self._unread -= 1


def sent_buckets(
    place: str, rank: int, device_type: str, seconds: float, slots: OpenSlots
) -> Generator[FlatBucket, None, None]:
    """In the generation process `rank`: all buckets of the sender at that address, each valid until the next
    is requested. Device memory is released after the last one."""
    connection, last, whole = connect(place, rank, seconds), False, False
    try:
        while not last:
            sent: SentBucket = pickle.loads(connection.receive())
            last = sent.header.last
            yield slots.read(sent)
            if last and isinstance(sent.place, DevicePlace):
                slots.close()
                return_memory(device_type)
            connection.send(READ)
        whole = True
    finally:
        connection.close()
        if not whole and device_type != "cpu":  # the slots may be device memory
            slots.close()
            return_memory(device_type)
