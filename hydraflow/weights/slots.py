"""Two buckets in memory that a sender shares with other processes on its node, used in turn.

In: buckets. Out: a `SentBucket`, a small handle with which another process finds the bytes. Host memory is a
file without a name (memfd): no file system limits its size, and it is freed when the last process that holds
it ends, however it ends. Device memory is lent by `device.py`. A slot must not be refilled while it is read:
a receiver owns it until it answers. Left out on purpose: that protocol (`workers/weights_shared.py`).
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
from hydraflow.weights.buckets import BucketMemory, FlatBucket, Header

SLOTS = 2
"""One bucket is loaded while the next is filled."""
_serials = count()


@dataclass(frozen=True)
class HostPlace:
    """Handle of host memory for other processes on the node."""

    pid: int
    descriptor: int
    nbytes: int
    serial: int
    """Unique in the owning process: descriptors may be reused."""

    def open(self) -> torch.Tensor:
        """uint8 (nbytes,), read-only. EnvironmentFault when the owning process is gone, or is another
        user's."""
        path = f"/proc/{self.pid}/fd/{self.descriptor}"
        try:
            found = os.open(path, os.O_RDONLY)
        except OSError as error:
            why = "the sending process is gone, or belongs to another user"
            raise EnvironmentFault(f"weights cannot be read from {path}: {error.strerror}; {why}") from None
        try:
            pages = mmap.mmap(found, self.nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
        finally:
            os.close(found)
        # from_dlpack accepts read-only memory without a warning
        return torch.from_dlpack(np.frombuffer(pages, dtype=np.uint8))


@dataclass(frozen=True)
class DevicePlace:
    """Handle of device memory for other processes on the node."""

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
    """A `Memory` on the host."""

    place: Place
    """Handle of the memory that was taken last."""

    def __init__(self) -> None:
        self._file = os.memfd_create("hydraflow-weights")
        weakref.finalize(self, os.close, self._file)
        self._flat = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> torch.Tensor:
        """See `Memory`. StoreFull when the host is out of memory."""
        if len(self._flat) < nbytes:
            try:
                # reserve the memory: running out of it later would raise SIGBUS
                os.posix_fallocate(self._file, 0, nbytes)
                pages = mmap.mmap(self._file, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            except OSError as error:
                raise StoreFull(
                    f"{socket.gethostname()} has no memory for a weight bucket of {nbytes} bytes"
                    f" ({error.strerror}). Make room, or make buckets smaller:"
                    " actor_rollout_ref.rollout.update_weights_bucket_megabytes"
                ) from None
            self._flat = torch.frombuffer(pages, dtype=torch.uint8)
            self.place = HostPlace(os.getpid(), self._file, nbytes, next(_serials))
        return self._flat[:nbytes]


class _DeviceSlot(BucketMemory):
    """A `Memory` on a device."""

    place: Place
    """Handle of the memory that was taken last."""

    def take(self, nbytes: int) -> torch.Tensor:
        if len(self._flat) < nbytes:
            super().take(nbytes)
            self.place = DevicePlace(lend(self._flat))
        return self._flat[:nbytes]


class Slots:
    """The sender's side. device: where the slots are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: list[_HostSlot | _DeviceSlot] = []

    def put(self, header: Header, numbers: Sequence[torch.Tensor]) -> SentBucket:
        """Copies the entries' numbers into the bucket's slot, which must not be in use."""
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
            self._open.pop(slot, None)  # releases the old memory before opening the new
            self._open[slot] = sent.place, sent.place.open()
        return FlatBucket(sent.header, self._open[slot][1])

    def close(self) -> None:
        """Releases the memory; slots are reopened when they are next read."""
        self._open.clear()
