"""Decides where GPU kernels replace plain operations.

In: a tensor. Out: the module with the kernels (`triton_kernels.py`), or None where plain operations are used:
on a CPU, in float64, and where Triton is missing or fails. Triton comes with torch for GPUs; it needs a C
compiler and Python's headers.
"""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from subprocess import SubprocessError
from types import ModuleType

import torch

TYPES = (torch.float32, torch.bfloat16, torch.float16)
_FAILURES = (ImportError, OSError, RuntimeError, AssertionError, SubprocessError)
"""Errors of Triton, of the compiler that it calls, and of drivers."""

log = logging.getLogger(__name__)


def kernels_for(x: torch.Tensor) -> ModuleType | None:
    """The kernels for this tensor's device and dtype; None: there are none."""
    return _kernels(x.device) if x.is_cuda and x.dtype in TYPES else None


@cache
def _kernels(device: torch.device) -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        from hydraflow.models import triton_kernels

        triton_kernels.try_out(device)
    except _FAILURES as error:
        log.warning("Triton fails, so GPUs compute with plain, slower operations: %s", error)
        return None
    return triton_kernels
