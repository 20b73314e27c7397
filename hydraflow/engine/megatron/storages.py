"""The memory of tensors, taken to the host and back.

In: tensors. Out: the same ones, whose storages are empty while their bytes are on the host. So whatever
looks at the memory of another tensor still does: parameters at Megatron-Core's flat buffers, AdamW's shards
at parameters. Megatron-Core's own ways leave out weights that are in no buffer (`offload_to_cpu` of buffers),
and make AdamW update copies of float32 weights (`offload_to_cpu` of optimizers). Left out on purpose: when
(`engine/offload.py`), page-locked host memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel

from hydraflow.engine.offload import HOST


class Storages:
    """The storages of the tensors that there are when they leave."""

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]]):
        self._tensors = tensors
        self._left: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    @torch.no_grad()
    def to_host(self) -> None:
        """Copies each storage once, however many tensors look at it, and frees it."""
        found = (tensor.untyped_storage() for tensor in self._tensors())
        for storage in {one.data_ptr(): one for one in found if one.nbytes()}.values():
            self._left.append((storage, _bytes(storage).to(HOST, copy=True)))
            storage.resize_(0)

    @torch.no_grad()
    def to_device(self) -> None:
        """Gives each storage its memory and its bytes again."""
        while self._left:
            storage, copy = self._left.pop()
            storage.resize_(copy.numel())
            _bytes(storage).copy_(copy)


class GradientBuffers:
    """The gradients' storages, which only give up their memory: between updates they hold zeros."""

    def __init__(self, models: Sequence[DistributedDataParallel]):
        self._models = models

    def to_host(self) -> None:
        """Frees them."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch: Megatron-Core resizes typed storages
            for model in self._models:
                model.offload_grad_buffers(empty_cache=False)

    def to_device(self) -> None:
        """Allocates them again."""
        for model in self._models:
            model.restore_grad_buffers()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
