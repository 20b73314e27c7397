"""Configuration of Ray, and of logs and profiles of its processes. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hydraflow.options import Rule, Switch, option

RAY_SETTINGS = {
    "free_objects_batch_size": 1,
    "prestart_worker_first_driver": False,
    "agent_register_timeout_ms": 180_000,
    "worker_register_timeout_seconds": 180,
}
"""Settings of every Ray cluster that we start. An object's memory is freed as soon as its last reference is
gone: by default Ray waits for a hundred objects or a second, and objects stored in the meantime take fresh
memory. Workers are started on demand: by default `ray.init` starts one per declared CPU and waits for them.
Agents and workers get three minutes to import: Ray's 30 and 60 seconds are too short on a busy machine, and a
worker that Ray gives up on is replaced by one that imports everything again."""


def _are_variables(value: dict[Any, Any]) -> bool:
    named = all(isinstance(name, str) and name and not set("=\0") & set(name) for name in value)
    return named and all(
        isinstance(one, str | int | float) and not isinstance(one, bool) for one in value.values()
    )


VARIABLES = Rule(
    "must map names to text or numbers; put true and false in quotes",
    _are_variables,
    example="{A: INFO, B: 1, C: 'true'}",
)
STEPS = Rule("must list training steps, counted from 1", lambda value: all(step >= 1 for step in value))
RANKS = Rule(
    "must list ranks, counted from 0", lambda value: bool(value) and all(rank >= 0 for rank in value)
)
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass
class RuntimeEnvConfig:
    """Environment of worker processes."""

    env_vars: dict[str, Any] = option(factory=dict, rule=VARIABLES)
    """Environment variables of all worker processes, name to text or number. Stored with the run."""

    def as_text(self) -> dict[str, str]:
        """The variables with their values as text.

        >>> RuntimeEnvConfig({"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": 1}).as_text()
        {'NCCL_DEBUG': 'INFO', 'NCCL_IB_DISABLE': '1'}
        """
        return {name: str(value) for name, value in self.env_vars.items()}


@dataclass
class RayInitConfig:
    """Connection to Ray."""

    address: str = "local"
    """local: start a private cluster for this run; otherwise the address of a running cluster, or auto."""
    num_cpus: int | None = option(None, ge=1)
    """Logical CPUs of a local cluster; null: the usable cores, but at least what the worker groups need."""
    runtime_env: RuntimeEnvConfig = field(default_factory=RuntimeEnvConfig)
    timeline_file: str | None = option(None, verl=("timeline_json_file",))
    """File for a Chrome trace of phases, calls and Ray's tasks, also written on failure (open it in
    ui.perfetto.dev); null: none."""


@dataclass
class LogConfig:
    """Log files <run>/logs/, one per role and rank."""

    level: str = option("info", choices=LOG_LEVELS)
    """Minimum log level of files and console; debug applies to hydraflow's own lines."""
    console: str | None = option(None, choices=LOG_LEVELS)
    """Minimum level of worker log lines shown on the console, with duplicates dropped; null: none."""
    max_megabytes: float = option(50.0, ge=0.001, le=100_000)
    """File size in megabytes at which a log is rotated (.log.1, .log.2, ...)."""
    keep: int = option(3, ge=0, le=1000)
    """Rotated files kept per role and rank."""


@dataclass
class ProfilerConfig:
    """Profiles of selected training steps."""

    tool: str | None = option(
        None, choices=("torch", "torch_memory", "nsys"), switch=Switch(off=None, remedy="{s}.tool=torch")
    )
    """torch (operators), torch_memory (allocations) or nsys (Nsight Systems); null: off."""
    steps: list[int] | None = option(None, rule=STEPS)
    """Training steps to profile; null: none."""
    save_path: str | None = None
    """Folder for the profiles (step_N/<roles>-<rank>.*); null: profile/ in the run folder."""
    ranks: list[int] | None = option(factory=lambda: [0], rule=RANKS)
    """Ranks of each worker group to profile; null: all."""

    def never_profiled(self, total_steps: int, most_ranks: int) -> Iterator[str]:
        """Notes on steps after the end of the run (0: not known yet), and on ranks that no role has.

        >>> [note] = ProfilerConfig("torch", steps=[2, 9], ranks=[0]).never_profiled(8, 2)
        >>> note.partition(", ")[0]
        'global_profiler.steps=[9]: the run has 8 training steps'
        """
        if self.tool is None:
            return
        if late := [step for step in self.steps or () if total_steps and step > total_steps]:
            yield (
                f"global_profiler.steps=[{','.join(map(str, late))}]: the run has {total_steps} training"
                f" steps, so these are never profiled; steps count from 1 to {total_steps}"
            )
        if absent := [rank for rank in self.ranks or () if rank >= most_ranks]:
            yield (
                f"global_profiler.ranks=[{','.join(map(str, absent))}]: ranks count from 0, and no role has"
                f" more than {most_ranks} of them, so these are never profiled"
            )
