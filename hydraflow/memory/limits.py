"""Memory and compute dtypes of the machines that `cluster.*` describes, or of this one.

In: the configuration, and /proc of this machine for what it leaves open. Out: `MemoryLimits`. Left out on
purpose: torch, and with it the memory of this machine's GPUs, so that it is not known without
`cluster.device_memory_gib`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hydraflow.device import (
    CPU_PROCESSES,
    cgroup_folders,
    cpu_has_bf16,
    listed_gpus,
    mkl_has_avx512,
    mkl_is_slow,
    planned_type,
)
from hydraflow.engine.config import FSDPConfig
from hydraflow.schema import PPOConfig
from hydraflow.system.allocation import allocation

GIB = 2**30
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number of each type."""
NO_LIMIT = 2**60
"""Control groups of version 1 write their largest number where there is no limit."""


@dataclass(frozen=True)
class MemoryLimits:
    """Memory of devices and machines. Sizes in bytes, None where not known."""

    device_type: str
    """cpu or gpu."""
    device_name: str
    devices_per_node: int
    device_bytes: int | None
    """Memory of one GPU; None on CPUs, too: the processes of a machine share its memory."""
    host_bytes: int | None
    half: bool
    """Whether a type of `auto` means bfloat16."""
    copies: Mapping[int, str] = field(default_factory=dict)
    """Bytes of a number -> which weights the native engine copies while it decodes (`COPIED`)."""
    notes: tuple[str, ...] = ()

    def bytes_of(self, dtype: str) -> int:
        """Bytes of a number of a configured type; auto as `device.resolve_dtype`."""
        return BYTES.get(dtype, 2 if self.half else 4)


@dataclass(frozen=True)
class BytesPerNumber:
    """Bytes of a number of a sharded model, by where it is."""

    kept: int
    """In the shards of weights and moments."""
    compute: int
    """In gathered weights, activations and their gradients."""
    reduced: int
    """In gradients while they are summed over ranks."""

    @classmethod
    def of(cls, fsdp: FSDPConfig, limits: MemoryLimits) -> BytesPerNumber:
        """The sizes for a model's configuration, resolved as in `engine/fsdp/build.py`."""
        names = fsdp.model_dtype, fsdp.compute_dtype, fsdp.reduce_dtype
        kept, compute, reduced = map(limits.bytes_of, names)
        return cls(kept, compute, compute if compute == 8 else reduced)


def limits_of(config: PPOConfig) -> MemoryLimits:
    """The limits in `cluster.*`; those of this machine for unset keys.

    >>> config = PPOConfig()
    >>> config.cluster.device, config.cluster.device_memory_gib = "H100", 80
    >>> limits_of(config).device_bytes // GIB
    80
    """
    trainer, cluster = config.trainer, config.cluster
    device_type = planned_type(trainer.device, cluster.device)
    elsewhere = device_type != "cpu" and not listed_gpus()
    host = None if elsewhere else host_memory().total
    if cluster.host_memory_gib:
        host = int(cluster.host_memory_gib * GIB)
    device = None
    if cluster.device_memory_gib and device_type != "cpu":
        device = int(cluster.device_memory_gib * GIB)
    asked = (cluster.devices_per_node, trainer.n_gpus_per_node, listed_gpus())
    notes = []
    if device is None and device_type != "cpu":
        notes.append("cluster.device_memory_gib is not set: whether a device has enough memory is not known")
    if host is None:
        notes.append("cluster.host_memory_gib is not set: whether a machine has enough memory is not known")
    return MemoryLimits(
        device_type=device_type,
        device_name=cluster.device or device_type,
        devices_per_node=next((count for count in asked if count and count > 0), CPU_PROCESSES),
        device_bytes=device,
        host_bytes=host,
        half=device_type != "cpu" or cpu_has_bf16(),
        copies={} if device_type != "cpu" else _copies(),
        notes=tuple(notes),
    )


def _copies() -> dict[int, str]:
    found = {}
    if mkl_is_slow():
        found[4] = "oneDNN's"
    elif mkl_has_avx512():
        found[4] = "MKL's"
    if cpu_has_bf16():
        found[2] = "all"
    return found


@dataclass(frozen=True)
class MachineMemory:
    """Memory of this machine in bytes, as far as this process may use it."""

    total: int
    available: int


def host_memory(
    cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> MachineMemory:
    """The machine's memory, or what a control group or Slurm allows, if that is less."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    if (given := allocation()) and given.memory_bytes:
        total, available = min(total, given.memory_bytes), min(available, given.memory_bytes)
    for folder in cgroup_folders("memory", cgroups, membership):
        versions = {"max": "current", "limit_in_bytes": "usage_in_bytes"}
        for limit_file, used_file in versions.items():
            limit, used = _number(folder / f"memory.{limit_file}"), _number(folder / f"memory.{used_file}")
            if limit is not None and limit < NO_LIMIT:
                total, available = min(total, limit), min(available, limit - (used or 0))
    return MachineMemory(total, max(0, available))


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
