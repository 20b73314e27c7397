"""A CPU that has a host memory apart from its own, so that weights can rest there as they would beside a
GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hydraflow.engine.fsdp.engine import FSDPEngine
from hydraflow.engine.offload import HOST, Offload


class MemoryApart(Offload):
    """Every move makes new tensors. At rest they are NaN, so that code that uses them without `wake` computes
    NaN; once awake, all older ones are, so that code that kept one does. Until then borrowed weights hold."""

    def __init__(self, module: nn.Module):
        super().__init__(self._leave, self._come, HOST, rests=True)
        self._module = module
        self.moves: list[str] = []
        self._values: list[torch.Tensor] = []
        self._left: list[torch.Tensor] = []

    def _leave(self) -> None:
        self.moves.append("rest")
        left, here = self._renew()
        for tensor in here:
            tensor.fill_(float("nan"))
        self._left = left

    def _come(self) -> None:
        self.moves.append("wake")
        for tensor, value in zip(held(self._module), self._values, strict=True):
            tensor.copy_(value)
        before, _ = self._renew()
        for tensor in [*self._left, *before]:
            tensor.fill_(float("nan"))

    @torch.no_grad()
    def _renew(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors before and after."""
        before = list(held(self._module))
        # as Module.to does, which makes no copies on the same device
        self._module._apply(lambda tensor: tensor.to(HOST, copy=True))
        after = list(held(self._module))
        assert not {one.data_ptr() for one in before if one.numel()} & {one.data_ptr() for one in after}
        self._values = [tensor.clone() for tensor in after]
        return before, after


def held(module: nn.Module) -> Iterator[torch.Tensor]:
    """This rank's shards of weights and gradients, and buffers."""
    tensors = [*module.buffers()]
    for parameter in module.parameters():
        tensors += [parameter] if parameter.grad is None else [parameter, parameter.grad]
    for tensor in tensors:
        yield tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class RestingEngine(FSDPEngine):
    """An engine that rests after each of its calls."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        assert self._fsdp.param_offload and not self._param_offload._rests, "a CPU is its own host"
        self._param_offload = MemoryApart(self.module)
        self.rest()


def rests_after(engine: type, name: str) -> Callable[..., Any]:
    """The engine's method of that name, after which it rests."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = getattr(engine, name)(self, *args, **kwargs)
        self.rest()
        return answer

    return method


CALLS = ("forward", "forward_backward", "optimizer_step", "save_hf", "snapshot", "load")
for _name in CALLS:
    setattr(RestingEngine, _name, rests_after(FSDPEngine, _name))
