"""Collectives of several ranks on one GPU, which NCCL refuses: by way of host memory, over gloo.

In: torch.distributed. Out: the same functions, which copy tensors of a GPU to the host, call gloo, and copy
what they got back. They have ended when they return, also where the caller does not ask them to wait. Only
for `gpu_ranks.py`, which shows with it that the code around the collectives is right on a GPU; it is slow.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
"""Function -> its argument for what arrives, and for what is sent. A version of torch may lack some."""


class Done:
    """The handle of a collective that has ended."""

    def wait(self, *unused: object) -> bool:
        return True


def install(device_type: str) -> None:
    """Replaces torch.distributed's functions in this process, before others import them by name: for tensors
    on devices of a type. Those of "cpu" are copied, too, so that a test needs no GPU."""
    for name, (arrives, sent) in CALLS.items():
        if hasattr(dist, name):
            _replace(name, _through_host(getattr(dist, name), arrives, sent, device_type))
    _replace("batch_isend_irecv", _sends_through_host(dist.batch_isend_irecv, device_type))
    _replace("_coalescing_manager", _one_by_one)


def _replace(name: str, function: Callable[..., Any]) -> None:
    for module in (dist, distributed_c10d):
        setattr(module, name, function)


def _through_host(
    function: Callable[..., Any], arrives: str, sent: str, device_type: str
) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def call(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        arguments = bound.arguments
        tensors = {name: arguments[name] for name in (arrives, sent) if arguments.get(name) is not None}
        if not any(
            one.device.type == device_type for several in tensors.values() for one in _listed(several)
        ):
            return function(*bound.args, **bound.kwargs)
        arguments.update({name: _copied(several) for name, several in tensors.items()})
        waits = not arguments.pop("async_op", False)
        function(*bound.args, **bound.kwargs)
        for there, here in zip(
            _listed(tensors.get(arrives, ())), _listed(arguments.get(arrives, ())), strict=True
        ):
            there.data.copy_(here)
        return None if waits else Done()

    return call


def _sends_through_host(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    def call(operations: Sequence[dist.P2POp]) -> Sequence[Any]:
        if not any(one.tensor.device.type == device_type for one in operations):
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


@contextmanager
def _one_by_one(*unused: object, **named: object) -> Iterator[Done]:
    """Instead of a manager that collects collectives and starts them at its end."""
    yield Done()


def _listed(several: Any) -> Sequence[torch.Tensor]:
    return [several] if isinstance(several, torch.Tensor) else several


def _copied(several: Any) -> Any:
    copies = [one.detach().to("cpu", copy=True) for one in _listed(several)]
    return copies[0] if isinstance(several, torch.Tensor) else copies
