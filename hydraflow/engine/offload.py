"""Tracks where a part of an engine's memory is: on the device while in use, in host memory while idle.

In: two functions that move it. Out: calls to them when needed. Left out on purpose: what moves, and how
(`fsdp/engine.py`, `megatron/storages.py`), pinned host memory, and FSDP2's CPU offload policy, which keeps
shards on the host even during a pass (`fsdp/build.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hydraflow.device import return_memory

HOST = torch.device("cpu")


class Offload:
    """The location of weights, gradients or optimizer state.

    rests: whether `rest` offloads them; must be False on a CPU.
    """

    def __init__(
        self,
        to_host: Callable[[], object],
        to_device: Callable[[], object],
        device: torch.device,
        *,
        rests: bool,
    ):
        self._to_host, self._to_device = to_host, to_device
        self._device, self._rests = device, rests
        self._at_rest = False
        self._borrowers = 0

    def wake(self) -> None:
        """Brings it to the device unless it is there."""
        if self._at_rest:
            self._to_device()
            self._at_rest = False

    def rest(self) -> None:
        """Moves it to host memory, until `wake`; not while it is borrowed."""
        if self._rests and not self._at_rest and not self._borrowers:
            self._to_host()
            return_memory(self._device.type)
            self._at_rest = True

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Keeps it on the device inside the block, which may span several calls of the role."""
        self.wake()
        self._borrowers += 1
        try:
            yield
        finally:
            self._borrowers -= 1
