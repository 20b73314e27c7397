"""Configuration of Ray. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RayInitConfig:
    """How the controller reaches Ray."""

    address: str = "local"
    """local starts a cluster of this run's own; else the address of a running one, or auto."""
    num_cpus: int | None = None
    """CPUs that a local cluster counts; null: those this process may use, and at least what the worker groups ask for."""
