"""A CPU that has a host memory apart from its own, so that weights can rest there as they would beside a
GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hydraflow.engine.fsdp.engine import FSDPEngine
from hydraflow.engine.fsdp.param_offload import ParamOffload


class MemoryApart(ParamOffload):
    """Every move makes new tensors. At rest they are NaN, so that whoever uses them without `wake` computes
    NaN; once awake, all older ones are, so that whoever kept one does. Until then borrowed weights hold."""

    def __init__(self, module: nn.Module):
        super().__init__(module, torch.device("cpu"), rests=True)
        self.moves: list[str] = []
        self._values: list[torch.Tensor] = []
        self._left: list[torch.Tensor] = []

    @torch.no_grad()
    def _move(self, device: torch.device) -> None:
        to_rest = not self._at_rest
        self.moves.append("rest" if to_rest else "wake")
        if not to_rest:
            for tensor, value in zip(held(self._module), self._values, strict=True):
                tensor.copy_(value)
        before = list(held(self._module))
        # as Module.to does, which makes no copies on the same device
        self._module._apply(lambda tensor: tensor.to(device, copy=True))
        after = list(held(self._module))
        assert not {one.data_ptr() for one in before if one.numel()} & {one.data_ptr() for one in after}
        self._values = [tensor.clone() for tensor in after]
        for tensor in after if to_rest else [*self._left, *before]:
            tensor.fill_(float("nan"))
        self._left = before if to_rest else []


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


def _resting(name: str) -> Callable[..., Any]:
    def method(self: RestingEngine, *args: Any, **kwargs: Any) -> Any:
        answer = getattr(FSDPEngine, name)(self, *args, **kwargs)
        self.rest()
        return answer

    return method


for _name in ("forward", "forward_backward", "optimizer_step", "save_hf", "snapshot", "load"):
    setattr(RestingEngine, _name, _resting(_name))
