"""The two sides of a transfer of weights on a node, from the actor's rank 0 to all generation processes: the
bytes are in two slots of memory that they share, and who may do what with a slot is said on a line to each.

In: buckets, as they are made. Out: buckets to load. The sender fills a slot once every receiver has said that
it has read the bucket before in it, so that one bucket is loaded while the next is made. Left out on purpose:
the memory (`weights/slots.py`) and the lines (`weights/line.py`).
"""

from __future__ import annotations

import pickle
from collections.abc import Generator, Sequence

import torch

from hydraflow.device import return_memory
from hydraflow.weights.buckets import FlatBucket, Header
from hydraflow.weights.line import Line, Listener, connect
from hydraflow.weights.slots import SLOTS, DevicePlace, OpenSlots, SentBucket, Slots

READ = b"read"
"""What a receiver says of a bucket."""


class SlotOutlet:
    """An `Outlet`, on the actor's rank 0. receivers: ranks of generation processes, which come to the
    listener. seconds: to wait for any of them."""

    def __init__(self, slots: Slots, listener: Listener, receivers: Sequence[int], seconds: float):
        self._slots, self._listener, self._receivers, self._seconds = slots, listener, receivers, seconds
        self._lines: list[Line] = []
        self._unread = 0
        """Buckets that some receiver may still be reading."""

    def send(self, header: Header, numbers: Sequence[torch.Tensor]) -> None:
        """See `Outlet`."""
        self._await(SLOTS - 1)
        sent = pickle.dumps(self._slots.put(header, numbers))
        self._lines = self._lines or self._listener.accept(self._receivers, self._seconds)
        for line in self._lines:
            line.send(sent)
        self._unread += 1

    def finish(self) -> None:
        """See `Outlet`."""
        self._await(0)

    def close(self) -> None:
        """For receivers that wait: no more will come."""
        self._listener.close()
        for line in self._lines:
            line.close()

    def _await(self, most: int) -> None:
        """Waits until at most so many buckets are unread."""
        while self._unread > most:
            for line in self._lines:
                line.receive()
            self._unread -= 1


def sent_buckets(
    place: str, rank: int, device_type: str, seconds: float, slots: OpenSlots
) -> Generator[FlatBucket, None, None]:
    """In a generation process of this rank: all buckets of the sender at that place, each valid until the
    next is asked for. After the last one memory of a device is given back: it has other uses for it."""
    line, last, whole = connect(place, rank, seconds), False, False
    try:
        while not last:
            sent: SentBucket = pickle.loads(line.receive())
            last = sent.header.last
            yield slots.read(sent)
            if last and isinstance(sent.place, DevicePlace):
                slots.close()
                return_memory(device_type)
            line.send(READ)
        whole = True
    finally:
        line.close()
        if not whole and device_type != "cpu":
            slots.close()
            return_memory(device_type)
