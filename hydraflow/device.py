"""The one place that knows which device there is, what it computes in, and how many cores this process may use.

Everything else asks here; no other module names "cuda". torch is imported inside the functions, because configuration
and planning ask for cores without needing it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cpu", "cuda")
"""What trainer.device may say."""
_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def usable_cores() -> int:
    """Cores that this process may really use: affinity mask, cgroup quota and Slurm's allocation."""
    cores = len(os.sched_getaffinity(0))
    if slurm := os.environ.get("SLURM_CPUS_PER_TASK"):
        cores = min(cores, int(slurm))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return max(1, cores)
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def gpu_count() -> int:
    """CUDA devices that this process sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def resolve_device(name: str) -> str:
    """The device type (cpu or cuda) of a configured name; auto takes CUDA where there is one."""
    if name != "auto":
        return name
    return "cuda" if gpu_count() else "cpu"


def current_device(device_type: str, local_rank: int) -> torch.device:
    """The device of one worker process, made current for the libraries that need that."""
    import torch

    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device(device_type, local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def collective_backend(device_type: str) -> str:
    """Backend of torch.distributed: host tensors can always be reduced, too."""
    return "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"


def resolve_dtype(name: str, device_type: str) -> torch.dtype:
    """The torch type of a configured name; auto is bfloat16 where the device computes in it, else float32."""
    import torch

    if name != "auto":
        return getattr(torch, _DTYPES[name])
    return torch.bfloat16 if _has_bf16(device_type) else torch.float32


def _has_bf16(device_type: str) -> bool:
    import torch

    if device_type == "cuda":
        return torch.cuda.is_bf16_supported()
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
