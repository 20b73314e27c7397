"""float32 products by OpenBLAS, which numpy comes with.

On processors other than Intel's, torch's own library, MKL, leaves AVX-512 unused, and oneDNN copies factors
that are transposed. OpenBLAS does neither: for the batched products of attention, 130 to 160 GFLOP/s instead
of MKL's 80 on one core of an AMD EPYC; for the gradients of linear layers, 220 to 240 instead of oneDNN's 185
to 230.
In: matrices, and batches of them, of any strides. Out: their products. Left out on purpose: several threads,
because OpenBLAS would have threads of its own, and computes a batch of small products with one.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from hydraflow.device import mkl_is_slow

AVX512 = ("SkylakeX", "Cooperlake", "SapphireRapids")
"""OpenBLAS's kernels that use AVX-512. It chooses its kernels when numpy is imported, by the processor or by
OPENBLAS_CORETYPE."""


def is_faster() -> bool:
    """Whether torch has one thread in this process, and OpenBLAS multiplies with AVX-512, which MKL does
    not. Then OpenBLAS has one thread from now on, too."""
    return torch.get_num_threads() == 1 and _uses_avx512()


@cache
def _uses_avx512() -> bool:
    if not mkl_is_slow() or "openblas" not in _library_of_numpy():
        return False
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:  # scripts/gpu_check.sh needs few packages
        return False
    loaded = ThreadpoolController().select(internal_api="openblas")
    kernels = [library["architecture"] for library in loaded.info()]
    if not kernels or any(name not in AVX512 for name in kernels):
        return False
    loaded.limit(limits=1)
    return True


def _library_of_numpy() -> str:
    """Name of the library with which numpy was built to multiply; conda's numpy says only "blas"."""
    built: Any = np.show_config(mode="dicts")
    return built["Build Dependencies"]["blas"]["name"]


def suits(x: Tensor) -> bool:
    """Whether to multiply this by OpenBLAS."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and is_faster()


def product(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`a @ b`, (..., M, K) and (..., K, N) to (..., M, N), on a CPU and without a gradient. In torch's
    profiles `openblas::mm`, or `openblas::bmm` with batches."""
    found = a.new_empty(*a.shape[:-1], b.shape[-1]) if out is None else out
    name = "openblas::mm" if a.ndim == 2 else "openblas::bmm"
    assert a.dtype == b.dtype == found.dtype, (a.dtype, b.dtype, found.dtype)
    profiled = record_function(name) if torch.autograd._profiler_enabled() else nullcontext()
    with profiled, np.errstate(all="ignore"):  # as torch, which reports neither overflow nor NaN
        np.matmul(_array(a), _array(b), out=_array(found))
    return found


def _array(x: Tensor) -> np.ndarray:
    """The same memory for numpy. `Tensor.numpy` would fix the size of its storage, which FSDP changes."""
    return np.from_dlpack(x.detach())
