"""Configuration of Ray, and of how its processes are watched. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RuntimeEnvConfig:
    """What worker processes find around them."""

    env_vars: dict[str, Any] = field(default_factory=dict)
    """Environment variables of all worker processes, by name: text or numbers; they are kept with the run."""

    def as_text(self) -> dict[str, str]:
        """The variables as an environment holds them.

        >>> RuntimeEnvConfig({"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": 1}).as_text()
        {'NCCL_DEBUG': 'INFO', 'NCCL_IB_DISABLE': '1'}
        """
        return {name: str(value) for name, value in self.env_vars.items()}


@dataclass
class RayInitConfig:
    """How the controller reaches Ray."""

    address: str = "local"
    """local starts a cluster of this run's own; else the address of a running one, or auto."""
    num_cpus: int | None = None
    """CPUs that a local cluster counts; null: those this process may use, and at least what the worker groups
    ask for."""
    runtime_env: RuntimeEnvConfig = field(default_factory=RuntimeEnvConfig)
    timeline_file: str | None = None
    """File for a Chrome trace of phases, calls and Ray's tasks, written at the end and on failure; opens in
    ui.perfetto.dev. null: none."""


@dataclass
class LogConfig:
    """What is written to <run>/logs/, one file for each role and rank."""

    level: str = "info"
    """Least level that is written, on the console too: debug, info, warning or error; debug is for
    hydraflow's own lines."""
    console: str | None = None
    """Least level of the workers' lines that the console shows, too; of equal lines of many workers one.
    null: none."""
    max_megabytes: float = 50.0
    """Size at which a file is set aside (.log.1, .log.2, ...) and a new one begun."""
    keep: int = 3
    """Files set aside that stay, of each role and rank."""


@dataclass
class ProfilerConfig:
    """Profiles of single training steps."""

    tool: str | None = None
    """torch (operators), torch_memory (allocations) or nsys (Nsight Systems); null: no profiles."""
    steps: list[int] | None = None
    """Training steps that are profiled; null: none."""
    save_path: str | None = None
    """Folder for the profiles, step_N/<roles>-<rank>.*; null: profile/ in the run folder."""
    ranks: list[int] | None = field(default_factory=lambda: [0])
    """Ranks of each worker group that are profiled; null: all."""
