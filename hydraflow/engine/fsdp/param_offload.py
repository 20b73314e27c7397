"""Where a sharded model's weights are: on the device while they are used, in host memory while their role
rests.

In: a sharded model. Out: the same parameters, buffers and gradients in the other memory. Parameters stay the
same objects, so an optimizer keeps its state for them. Left out on purpose: the optimizer's moments
(`engine.py`), page-locked host memory, and FSDP2's own CPU offload policy, which keeps shards on the host
during a pass, too (`build.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hydraflow.device import return_memory

HOST = torch.device("cpu")


class ParamOffload:
    """The place of one model's weights.

    rests: whether they go to host memory at all; never where that is the device itself.
    """

    def __init__(self, module: nn.Module, device: torch.device, *, rests: bool):
        self._module, self._device, self._rests = module, device, rests
        self._at_rest = False
        self._borrowers = 0

    def wake(self) -> None:
        """Brings the weights to the device unless they are there."""
        if self._at_rest:
            self._move(self._device)
            self._at_rest = False

    def rest(self) -> None:
        """Moves the weights to host memory, until `wake`; not while they are borrowed."""
        if self._rests and not self._at_rest and not self._borrowers:
            self._move(HOST)
            self._at_rest = True

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Keeps the weights on the device inside the block, which may last for several calls of the role."""
        self.wake()
        self._borrowers += 1
        try:
            yield
        finally:
            self._borrowers -= 1

    def _move(self, device: torch.device) -> None:
        """FSDP2 frees gathered weights first, and notes where the shards are afterwards."""
        self._module.to(device)
        if device == HOST:
            return_memory(self._device.type)
