"""Memory through which the ranks of a group exchange tensors when all of them run on one machine.

gloo sends through TCP even there: exchanging 2 MB between two ranks takes 3.6 ms, through shared memory 0.3;
64 MB take 28 and 24 ms. In: rows for the other ranks. Out: theirs. Every rank writes into its own window and
reads those of the others. Windows are files in memory without a path, which the system frees with the last
process that maps them, so a killed one leaves nothing behind; /dev/shm, which is small in containers, is not
used. Left out on purpose: groups across machines, and systems other than Linux, where gloo sends.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from hydraflow.engine.config import WINDOW_BYTES
from hydraflow.models.chunks import chunk_slices

LEAST_BYTES = 2**17
"""Rows of fewer bytes are sent faster by gloo."""
_LINE = 64
"""Bytes of a line of the caches, at which places start."""


class Windows:
    """The windows of a group's ranks, mapped by all of them."""

    def __init__(self, group: dist.ProcessGroup, windows: list[Tensor]):
        self._group, self._windows = group, [window.view(2, -1) for window in windows]
        self._half = 0

    def parts(self, sent: Tensor) -> Iterator[tuple[slice, dict[int, Tensor]]]:
        """Sends row i of `sent` (ranks, n) to rank i. Yields, slice by slice, what each other rank has sent
        to this one, by rank; it is valid until the next slice. One half is written while others may still
        read the other, so one barrier for each slice suffices."""
        size, mine = len(sent), self._group.rank()
        others = [rank for rank in range(size) if rank != mine]
        to_all = sent.stride(0) == 0  # one row for all ranks
        room = self._windows[0].shape[1] // (1 if to_all else size - 1) // _LINE * _LINE // sent.itemsize

        def place(of: int, to: int, count: int) -> Tensor:
            """Where rank `of` writes what rank `to` reads."""
            half = self._windows[of][self._half].view(sent.dtype)
            return half.narrow(0, 0 if to_all else (to - (to > of)) * room, count)

        for part in chunk_slices(sent.shape[1], room):
            count = min(room, sent.shape[1] - part.start)
            for other in others[:1] if to_all else others:
                place(mine, other, count).copy_(sent[other, part])
            dist.barrier(self._group)
            found = {other: place(other, mine, count) for other in others}
            self._half = 1 - self._half
            yield part, found


def windows_for(sent: Tensor, group: dist.ProcessGroup) -> Windows | None:
    """The windows through which to send rows (ranks, n); None: gloo sends them. The first call of a group
    with large rows is collective."""
    return windows_of(group) if len(sent) > 1 and sent[0].nbytes >= LEAST_BYTES else None


@cache
def windows_of(group: dist.ProcessGroup) -> Windows | None:
    """The windows of a group; None: its ranks cannot share memory. The first call is collective."""
    name = secrets.token_hex(8)
    file = _make(name)
    paths: list[tuple[str, str]] = [("", "")] * group.size()
    dist.all_gather_object(paths, (f"/proc/{os.getpid()}/fd/{file}", name), group=group)
    mapped = [_map(*path) for path in paths]
    shared = torch.tensor([all(window is not None for window in mapped)], dtype=torch.int32)
    dist.all_reduce(shared, dist.ReduceOp.MIN, group)  # then all ranks have mapped, or failed
    if file is not None:
        os.close(file)
    return Windows(group, [window for window in mapped if window is not None]) if shared else None


def _make(name: str) -> int | None:
    """A file in memory, whose pages exist from now on; None where there can be none."""
    try:
        file = os.memfd_create(name)
    except (AttributeError, OSError):  # not Linux, or forbidden
        return None
    try:
        os.posix_fallocate(file, 0, WINDOW_BYTES)
    except OSError:
        os.close(file)
        return None
    return file


def _map(path: str, name: str) -> Tensor | None:
    """The window of a rank; None where it cannot be reached: on another machine or in another container the
    path leads nowhere, or to another file."""
    try:
        if os.readlink(path) != f"/memfd:{name} (deleted)":
            return None
        return torch.from_file(path, shared=True, size=WINDOW_BYTES, dtype=torch.uint8)
    except (OSError, RuntimeError):
        return None
