"""Configuration of Ray. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RuntimeEnvConfig:
    """What worker processes find around them."""

    env_vars: dict[str, str] = field(default_factory=dict)
    """Environment variables of all worker processes, by name; they are kept with the run."""


@dataclass
class RayInitConfig:
    """How the controller reaches Ray."""

    address: str = "local"
    """local starts a cluster of this run's own; else the address of a running one, or auto."""
    num_cpus: int | None = None
    """CPUs that a local cluster counts; null: those this process may use, and at least what the worker groups ask for."""
    runtime_env: RuntimeEnvConfig = field(default_factory=RuntimeEnvConfig)
