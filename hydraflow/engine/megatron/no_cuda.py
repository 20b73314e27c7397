"""Replaces `torch.cuda` for Megatron-Core on a machine without CUDA (`without_cuda.py`).

Streams and events do nothing, because on a CPU the work is done when the call returns. Collectives on tensors
of different lengths are here because gloo has none. Whatever this module lacks comes from `torch.cuda`.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")


def nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in for calls that a CPU does not need."""


class Event:
    """An event that has always been recorded."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    record = wait = synchronize = nothing

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds."""
        return 0.0


class Stream:
    """The only stream there is."""

    cuda_stream, device = 0, CPU

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    wait_stream = wait_event = synchronize = nothing

    def record_event(self, *args: Any) -> Event:
        """An event at this point."""
        return Event()

    def __enter__(self) -> Stream:
        return self

    __exit__ = nothing


ExternalStream = Stream
_ONLY = Stream()
synchronize = empty_cache = set_device = set_stream = _lazy_init = nothing
FloatTensor, HalfTensor, BFloat16Tensor = torch.FloatTensor, torch.HalfTensor, torch.BFloat16Tensor
manual_seed = torch.manual_seed


stream = contextlib.nullcontext  # work inside runs as anywhere else
nvtx = SimpleNamespace(range_push=nothing, range_pop=nothing, range=contextlib.nullcontext)


def current_stream(*args: Any) -> Stream:
    return _ONLY


default_stream = current_stream


def current_device() -> torch.device:
    """Megatron-Core creates tensors there."""
    return CPU


def device_count() -> int:
    return 1


def is_available() -> bool:
    return False


def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    """State of the CPU's generator."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def all_gather(parts: list[torch.Tensor], mine: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-gather of tensors that differ in length."""
    longest = max(len(part) for part in parts)
    filled = mine.new_zeros(longest, *mine.shape[1:])
    filled[: len(mine)] = mine
    found = [torch.empty_like(filled) for _ in parts]
    dist.all_gather(found, filled, group=group)
    for part, of_rank in zip(parts, found, strict=True):
        part.copy_(of_rank[: len(part)])


def reduce_scatter(mine: torch.Tensor, parts: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Reduce-scatter of tensors that differ in length."""
    whole = torch.cat(parts)
    dist.all_reduce(whole, group=group)
    mine.copy_(whole.split([len(part) for part in parts])[group.rank()])


def _lazy_call(call: Any, **kwargs: Any) -> None:
    call()


def _no_bytes(*args: Any) -> int:
    return 0


memory_allocated = memory_reserved = _no_bytes


def __getattr__(name: str) -> Any:
    return getattr(torch.cuda, name)


class _Generators:
    def __getitem__(self, device: Any) -> torch.Generator:
        return torch.default_generator


default_generators = _Generators()
random = SimpleNamespace(get_rng_state=get_rng_state, set_rng_state=set_rng_state, manual_seed=manual_seed)
