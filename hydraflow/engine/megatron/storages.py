"""Moves the storages of tensors to host memory and back.

In: tensors. Out: the same tensors, whose storages are empty while their bytes are on the host. Views stay
valid: parameters are views of Megatron-Core's flat buffers, and AdamW's shards are views of parameters.
Megatron-Core's own offloading is not used: `offload_to_cpu` of buffers skips weights outside of them, and
that of optimizers makes AdamW update copies of float32 weights. Left out on purpose: when to move
(`engine/offload.py`), pinned host memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel

from hydraflow.engine.offload import HOST


class Storages:
    """The storages of a set of tensors; `tensors` is called again for each move to the host."""

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]]):
        self._tensors = tensors
        self._left: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    @torch.no_grad()
    def to_host(self) -> None:
        """Copies each storage once, however many tensors share it, and frees it."""
        found = (tensor.untyped_storage() for tensor in self._tensors())
        for storage in {one.data_ptr(): one for one in found if one.nbytes()}.values():
            self._left.append((storage, _bytes(storage).to(HOST, copy=True)))
            storage.resize_(0)

    @torch.no_grad()
    def to_device(self) -> None:
        """Reallocates each storage and copies its bytes back."""
        while self._left:
            storage, copy = self._left.pop()
            storage.resize_(copy.numel())
            _bytes(storage).copy_(copy)


class GradientBuffers:
    """The storages of gradients. They are freed without a copy, because they hold zeros between updates."""

    def __init__(self, models: Sequence[DistributedDataParallel]):
        self._models = models

    def to_host(self) -> None:
        """Frees them."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron-Core resizes typed storages, which torch deprecates
            for model in self._models:
                model.offload_grad_buffers(empty_cache=False)

    def to_device(self) -> None:
        """Reallocates them, filled with zeros."""
        for model in self._models:
            model.restore_grad_buffers()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
