"""Collectives between several ranks on one GPU, which NCCL refuses: through host memory, with gloo.

In: torch.distributed. Out: its functions, which after `start` copy GPU tensors to the host, call gloo, and
copy the result back. They are synchronous even with async_op. Slow, and only for `gpu_ranks.py`, which checks
with it that the code around the collectives is right on a GPU. Import it before modules that import the
functions by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

CALLS = {
    "all_reduce": ("tensor", "tensor"),
    "reduce": ("tensor", "tensor"),
    "broadcast": ("tensor", "tensor"),
    "gather": ("gather_list", "tensor"),
    "all_gather": ("tensor_list", "tensor"),
    "all_gather_into_tensor": ("output_tensor", "input_tensor"),
    "all_gather_single": ("output_tensor", "input_tensor"),
    "reduce_scatter": ("output", "input_list"),
    "reduce_scatter_tensor": ("output", "input"),
    "reduce_scatter_single": ("output", "input"),
    "all_to_all_single": ("output", "input"),
}
"""Function -> its arguments for the output and the input. Some versions of torch lack some of them."""


class Done:
    """The handle of a finished collective."""

    def wait(self, *unused: object) -> bool:
        return True


_copied_type = ""
"""The type of the devices whose tensors are copied; none before `start`."""


def start(device_type: str) -> None:
    """From now on, copies tensors on devices of this type in this process. Works with "cpu", too, so
    that tests need no GPU."""
    global _copied_type
    _copied_type = device_type


def _install() -> None:
    for name, (arrives, sent) in CALLS.items():
        if hasattr(dist, name):
            _replace(name, _through_host(getattr(dist, name), arrives, sent))
    _replace("batch_isend_irecv", _sends_through_host(dist.batch_isend_irecv))
    _replace("_coalescing_manager", _without_batches(distributed_c10d._coalescing_manager))


def _replace(name: str, function: Callable[..., Any]) -> None:
    for module in (dist, distributed_c10d):
        setattr(module, name, function)


def _through_host(function: Callable[..., Any], arrives: str, sent: str) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def call(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        arguments = bound.arguments
        tensors = {name: arguments[name] for name in (arrives, sent) if arguments.get(name) is not None}
        if not any(
            one.device.type == _copied_type for several in tensors.values() for one in _listed(several)
        ):
            return function(*bound.args, **bound.kwargs)
        arguments.update({name: _copied(several) for name, several in tensors.items()})
        waits = not arguments.pop("async_op", False)
        function(*bound.args, **bound.kwargs)
        outputs, copies = _listed(tensors.get(arrives, ())), _listed(arguments.get(arrives, ()))
        for output, copy in zip(outputs, copies, strict=True):
            output.data.copy_(copy)
        return None if waits else Done()

    return call


def _sends_through_host(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(operations: Sequence[dist.P2POp]) -> Sequence[Any]:
        if not any(one.tensor.device.type == _copied_type for one in operations):
            return function(operations)
        hosts = [_copied(one.tensor) for one in operations]
        works: list[Any] = [
            dist.isend(host, group=one.group, group_dst=one.group_peer)
            if one.op.__name__ == "isend"
            else dist.irecv(host, group=one.group, group_src=one.group_peer)
            for one, host in zip(operations, hosts, strict=True)
        ]
        for one, host, work in zip(operations, hosts, works, strict=True):
            work.wait()
            if one.op.__name__ == "irecv":
                one.tensor.data.copy_(host)
        return [Done()] * len(operations)

    return call


def _without_batches(function: Callable[..., Any]) -> Callable[..., Any]:
    """In place of a manager that batches collectives and starts them on exit."""

    def manager(*given: Any, **named: Any) -> Any:
        return nullcontext(Done()) if _copied_type else function(*given, **named)

    return manager


def _listed(several: Any) -> Sequence[torch.Tensor]:
    return [several] if isinstance(several, torch.Tensor) else several


def _copied(several: Any) -> Any:
    copies = [one.detach().to("cpu", copy=True) for one in _listed(several)]
    return copies[0] if isinstance(several, torch.Tensor) else copies


_install()
