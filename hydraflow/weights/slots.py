"""Two buckets in memory that a sender shares with other processes of its node, used in turn.

In: buckets. Out: a `SentBucket`, small, by which another process finds the bytes. Host memory is a file
without a name (memfd): no folder limits its size, and it is gone with the last process that holds it, however
that ends. Device memory is lent through the device's door. Who fills a slot waits until nobody reads it: the
caller hands a slot over, and the process that is told of a bucket owns it until its answer. Left out on
purpose: that order (`workers/weights_line.py`).
"""

from __future__ import annotations

import mmap
import os
import socket
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from hydraflow.device import LentTensor, borrow, finish_work, lend
from hydraflow.errors import EnvironmentFault, StoreFull
from hydraflow.weights.buckets import FlatBucket, Header

SLOTS = 2
"""One bucket is loaded while the next is made."""
_serials = count()


@dataclass(frozen=True)
class HostPlace:
    """Where the processes of a node find host memory."""

    pid: int
    descriptor: int
    nbytes: int
    serial: int
    """Of the memory in its process, where a descriptor may be used again for another one."""

    def open(self) -> torch.Tensor:
        """uint8 (nbytes,), read-only. EnvironmentFault when the process that made it is gone, or is another
        user's."""
        path = f"/proc/{self.pid}/fd/{self.descriptor}"
        try:
            found = os.open(path, os.O_RDONLY)
        except OSError as error:
            why = "the process that sends them is gone, or not this user's"
            raise EnvironmentFault(f"weights cannot be read from {path}: {error.strerror}; {why}") from None
        try:
            pages = mmap.mmap(found, self.nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
        finally:
            os.close(found)
        # from_dlpack accepts read-only memory without a warning
        return torch.from_dlpack(np.frombuffer(pages, dtype=np.uint8))


@dataclass(frozen=True)
class DevicePlace:
    """Where the processes of a node find memory of a device."""

    lent: LentTensor

    def open(self) -> torch.Tensor:
        """uint8 (nbytes,), on that device."""
        return borrow(self.lent)


Place = HostPlace | DevicePlace


@dataclass(frozen=True)
class SentBucket:
    """A bucket in a slot."""

    header: Header
    place: Place


class _HostSlot:
    """A `Memory` of the host."""

    place: Place
    """Of what was taken."""

    def __init__(self) -> None:
        self._file = os.memfd_create("hydraflow-weights")
        weakref.finalize(self, os.close, self._file)
        self._flat = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> torch.Tensor:
        """See `Memory`. StoreFull: there is none."""
        if len(self._flat) < nbytes:
            try:
                os.posix_fallocate(self._file, 0, nbytes)  # else a lack of memory would be a signal
                pages = mmap.mmap(self._file, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            except OSError as error:
                raise StoreFull(
                    f"{socket.gethostname()} has no memory for a bucket of weights of {nbytes} bytes"
                    f" ({error.strerror}). Make room, or make buckets smaller:"
                    " actor_rollout_ref.rollout.update_weights_bucket_megabytes"
                ) from None
            self._flat = torch.frombuffer(pages, dtype=torch.uint8)
            self.place = HostPlace(os.getpid(), self._file, nbytes, next(_serials))
        return self._flat[:nbytes]


class _DeviceSlot:
    """A `Memory` of a device."""

    place: Place
    """Of what was taken."""

    def __init__(self, device: torch.device) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, nbytes: int) -> torch.Tensor:
        """See `Memory`."""
        if len(self._flat) < nbytes:
            self._flat = self._flat.new_empty(nbytes)
            self.place = DevicePlace(lend(self._flat))
        return self._flat[:nbytes]


class Slots:
    """The sender's side. device: where the slots are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: list[_HostSlot | _DeviceSlot] = []

    def put(self, header: Header, numbers: Sequence[torch.Tensor]) -> SentBucket:
        """Copies the numbers of each entry into the bucket's slot, which nobody may be reading."""
        while len(self._slots) <= header.number % SLOTS:
            host = self._device.type == "cpu"
            self._slots.append(_HostSlot() if host else _DeviceSlot(self._device))
        slot = self._slots[header.number % SLOTS]
        FlatBucket.of(header, numbers, slot)
        finish_work(self._device.type)
        return SentBucket(header, slot.place)


class OpenSlots:
    """A receiver's side: it opens each slot once."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[Place, torch.Tensor]] = {}

    def read(self, sent: SentBucket) -> FlatBucket:
        """The bucket, in the sender's memory."""
        slot = sent.header.number % SLOTS
        if slot not in self._open or self._open[slot][0] != sent.place:
            self._open.pop(slot, None)  # not both at a time
            self._open[slot] = sent.place, sent.place.open()
        return FlatBucket(sent.header, self._open[slot][1])

    def close(self) -> None:
        """Gives the memory back; what is read next is opened again."""
        self._open.clear()
