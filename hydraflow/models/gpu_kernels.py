"""Where kernels for a GPU replace plain operations.

In: a tensor. Out: the module with the kernels (`triton_kernels.py`), or None where the plain operations stay:
on a CPU, in float64, or without Triton, which torch for GPUs brings along.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

import torch

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernels_for(x: torch.Tensor) -> ModuleType | None:
    """The kernels that take such a tensor; None: there are none."""
    return _kernels() if x.is_cuda and x.dtype in TYPES else None


@cache
def _kernels() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from hydraflow.models import triton_kernels

    return triton_kernels
