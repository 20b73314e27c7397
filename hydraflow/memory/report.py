"""The result of the memory estimate: bytes by role, part, phase and device, whether they fit, and advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from hydraflow.memory.limits import MemoryLimits

PHASES = ("sample", "log_probs", "update", "sync")
"""Phases of a step, in which the roles of a device work one after another."""


@dataclass(frozen=True)
class MemoryParts:
    """Bytes on one device by purpose; `host` is host memory used for that device."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    """Layers that FSDP gathers temporarily, and the buffers of its collectives."""
    activations: int = 0
    logits: int = 0
    kv_cache: int = 0
    weight_sync: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """Sum of the bytes on the device, without `host`."""
        return sum(self.on_device().values())

    def on_device(self) -> dict[str, int]:
        """Name -> bytes, in the order of the fields; without `host`."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "host"}

    def __add__(self, other: MemoryParts) -> MemoryParts:
        names = (one.name for one in fields(self))
        return MemoryParts(**{name: getattr(self, name) + getattr(other, name) for name in names})


def fullest(*moments: MemoryParts) -> MemoryParts:
    """The parts with the most bytes on the device."""
    return max(moments, key=lambda parts: parts.total)


@dataclass(frozen=True)
class RoleMemory:
    """One role on each of its devices; where devices differ (pipeline stages), the fullest."""

    role: str
    engine: str
    devices: int
    resting: MemoryParts
    """While other roles work."""
    phases: Mapping[str, MemoryParts]
    """The peak of each phase in which the role works."""

    @property
    def peak_phase(self) -> str:
        """The phase in which it holds most."""
        return max(self.phases, key=lambda name: self.phases[name].total)

    @property
    def peak(self) -> MemoryParts:
        return self.phases[self.peak_phase]

    @property
    def parts(self) -> dict[str, int]:
        """Bytes at its peak, by purpose."""
        return self.peak.on_device()

    @property
    def total(self) -> int:
        return self.peak.total

    @property
    def host(self) -> int:
        """Bytes in host memory, for one device."""
        return max(parts.host for parts in (self.resting, *self.phases.values()))


@dataclass(frozen=True)
class DeviceGroup:
    """Devices that hold the same roles."""

    devices: str
    """Their numbers, as in 0-7,16."""
    count: int
    roles: tuple[str, ...]
    phases: Mapping[str, int]
    """Phase -> bytes on each device: of the active role, and of the idle ones."""
    limit: int | None
    """Bytes of one device; None: not known, or processes share the machine's memory."""

    @property
    def peak_phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def peak(self) -> int:
        """Bytes on each device in that phase."""
        return self.phases[self.peak_phase]

    @property
    def fits(self) -> bool | None:
        """None: the limit is not known."""
        return None if self.limit is None else self.peak <= self.limit


@dataclass(frozen=True)
class HostMemoryEstimate:
    """Memory of the fullest machine."""

    load: int
    """Bytes that the processes that read model files hold at the same time."""
    load_text: str
    """How models are loaded, in a sentence."""
    offload: int
    """Bytes that roles offload from their devices."""
    processes: int
    """Worker processes after their imports."""
    running: int
    """On CPUs: what the processes hold in the fullest phase; otherwise 0."""
    limit: int | None
    rows: int = 0
    """Bytes of a step's trajectories in the object store, all of maximum length."""
    slots: int = 0
    """Two weight buckets for a rollout in another process; they are kept between transfers."""

    @property
    def total(self) -> int:
        """The larger of loading and running: models are loaded before anything else is allocated."""
        return self.processes + max(self.load, self.offload + self.running + self.rows + self.slots)

    @property
    def fits(self) -> bool | None:
        """None: the limit is not known."""
        return None if self.limit is None else self.total <= self.limit


@dataclass(frozen=True)
class Advice:
    """A change that makes room."""

    override: str
    """As `key=value`, to paste."""
    saves: int
    """Bytes at the peak, in addition to the advice before it."""
    effect: str
    """What it costs."""
    where: str
    """device or host."""


@dataclass(frozen=True)
class MemoryReport:
    """The memory estimate of a run: roles, devices, machine and advice."""

    limits: MemoryLimits
    roles: tuple[RoleMemory, ...]
    groups: tuple[DeviceGroup, ...]
    host: HostMemoryEstimate
    notes: tuple[str, ...]
    advice: tuple[Advice, ...] = ()
    """Changes in the order in which to try them; empty when everything fits or limits are not known."""

    @property
    def fits(self) -> bool | None:
        """Whether the run fits devices and machines; None: no known limit is exceeded, but not all are
        known."""
        fits = [self.host.fits, *(group.fits for group in self.groups if self.limits.device_type != "cpu")]
        if any(one is False for one in fits):
            return False
        return None if any(one is None for one in fits) else True

    @property
    def missing(self) -> tuple[str, int]:
        """Where the shortage is largest, device or host, and its bytes; 0 or less if everything with a known
        limit fits."""
        found = [("device", group.peak - group.limit) for group in self.groups if group.limit is not None]
        if self.host.limit is not None:
            found.append(("host", self.host.total - self.host.limit))
        return max(found, key=lambda one: one[1], default=("device", 0))

    @property
    def missing_after_advice(self) -> int:
        """Remaining shortage in bytes if all advice is followed; 0: it fits."""
        return max(0, self.missing[1] - sum(one.saves for one in self.advice))

    def to_json(self) -> dict[str, Any]:
        roles = [{**asdict(one), "peak_phase": one.peak_phase, "total": one.total} for one in self.roles]
        derived = ("peak", "peak_phase", "fits")
        groups = [asdict(one) | {name: getattr(one, name) for name in derived} for one in self.groups]
        host = {**asdict(self.host), "total": self.host.total, "fits": self.host.fits}
        parts = {"roles": roles, "groups": groups, "host": host, "fits": self.fits}
        return {**asdict(self), **parts, "missing_after_advice": self.missing_after_advice}


def size_text(size: float) -> str:
    """Bytes in human-readable form, in powers of 1024 with three digits.

    >>> size_text(123456789), size_text(7.41 * 2**30), size_text(900)
    ('118 MiB', '7.41 GiB', '900 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 999.5 or unit == "TiB":
            break
        size /= 1024
    digits = 0 if unit == "B" else max(0, 2 - len(str(int(abs(size)))) + 1)
    return f"{size:.{digits}f} {unit}"
