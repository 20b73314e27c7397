"""Fills in unset keys from the batch system's allocation, and checks set keys against it.

In: the leaves of a composition, an `Allocation`. Out: more leaves, with the variable as their origin; or
problems that name both sides. Keys that the user set win: using less than the allocation is fine, using more
is an error. Left out on purpose: reading the variables (`system/allocation.py`), memory (`memory/limits.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hydraflow.device import CPU_PROCESSES
from hydraflow.errors import Problem
from hydraflow.schema import JobConfig, PPOConfig, RayCommandConfig
from hydraflow.system.allocation import Allocation
from hydraflow.system.printing import count

NODES, DEVICES, CPUS = "trainer.nnodes", "trainer.n_gpus_per_node", "ray_init.num_cpus"
ROLLOUT_NODES = "actor_rollout_ref.rollout.nnodes"
ROLLOUT_DEVICES = "actor_rollout_ref.rollout.n_gpus_per_node"
BESIDE = 1
"""CPUs per machine that Ray counts besides one for each training process: one for the reward process."""


def fill_in(schema: type, leaves: dict[str, Any], origins: dict[str, str], given: Allocation | None) -> None:
    """Fills in unset keys: the nodes of a running cluster, minus those of the rollout; GPUs; the CPUs of
    this run's own cluster."""
    if given is None or not issubclass(schema, RayCommandConfig):
        return
    local = leaves.get("ray_init.address", "local") == "local"
    found = {NODES: "nodes", DEVICES: "gpus", CPUS: "cpus"}
    if local:
        del found[NODES]  # this run's own cluster is one machine, even if the job has more
    if leaves.get("trainer.device") == "cpu":
        del found[DEVICES]
    if leaves.get("debug") or leaves.get("trainer.debug.local"):
        found = {CPUS: "cpus"}  # debugging uses one process per role
    for key, field in found.items():
        value = getattr(given, field)
        if value is None or key in origins:
            continue
        if key == NODES:
            value -= int(leaves.get(ROLLOUT_NODES) or 0)
            if value < 1:
                continue  # `contradictions` reports it
        processes = int(leaves.get(DEVICES) or CPU_PROCESSES)
        if key == CPUS and not (local and value >= processes + BESIDE):
            continue
        leaves[key], origins[key] = value, f"follows {given.source(field)}"


def contradictions(config: Any, given: Allocation | None) -> Iterator[Problem]:
    """Problems where the configuration asks for more than the allocation, with a remedy for either side."""
    if given is None or not isinstance(config, JobConfig):
        return
    trainer, on_gpus = config.trainer, given.gpus is not None and config.trainer.device != "cpu"
    own = config.actor_rollout_ref.rollout.nnodes if isinstance(config, PPOConfig) else 0
    if given.nodes is not None and trainer.nnodes + own > given.nodes:
        rule = f"Slurm gave job {given.job} {count(given.nodes, 'node')} ({given.source('nodes')})"
        rule += f", and the rollout has {own} of its own" if own else ""
        fewer = (
            f"{NODES}={given.nodes - own}"
            if given.nodes > own
            else f"{ROLLOUT_NODES}=0 {NODES}={given.nodes}"
        )
        remedy = f"{fewer} or sbatch --nodes={trainer.nnodes + own}"
        yield Problem(NODES, trainer.nnodes, rule, remedy)
    asked = {DEVICES: trainer.n_gpus_per_node or 0}
    if own and isinstance(config, PPOConfig):
        asked[ROLLOUT_DEVICES] = config.actor_rollout_ref.rollout.n_gpus_per_node
    too_many = {key: gpus for key, gpus in asked.items() if on_gpus and gpus > (given.gpus or 0)}
    for key, gpus in too_many.items():
        there = f"{count(given.gpus or 0, 'GPU')} on this node ({given.source('gpus')})"
        remedy = f"{key}={given.gpus} or sbatch --gpus-per-node={gpus}"
        yield Problem(key, gpus, f"Slurm gave job {given.job} {there}", remedy)
    if DEVICES not in too_many and on_gpus and given.cpus is not None and config.ray_init.num_cpus is None:
        yield from _cores(trainer.n_gpus_per_node or given.gpus or 0, given)


def started_by_torchrun(config: Any, started: tuple[int, int] | None) -> Iterator[Problem]:
    """A problem if torchrun started a command that starts its own processes; `started`: torchrun's (nodes,
    processes per node)."""
    if started is None or not isinstance(config, RayCommandConfig):
        return
    nodes, processes = started
    rule = f"has started this {nodes * processes} times; start it once: it starts its own workers"
    remedy = f"{type(config).__doc__} ... {NODES}={nodes} {DEVICES}={processes}"
    yield Problem("torchrun", None, rule, remedy)


def _cores(processes: int, given: Allocation) -> Iterator[Problem]:
    """With Slurm's default of one core, the processes of several GPUs would wait for the core instead of
    their GPUs."""
    assert given.cpus is not None
    if processes > given.cpus:
        limit = f"all that Slurm gave job {given.job} ({given.source('cpus')})"
        rule = f"that many processes would share {count(given.cpus, 'core')}, {limit}"
        fewer = f"{DEVICES}={given.cpus} or {CPUS}={processes + BESIDE}"
        yield Problem(DEVICES, processes, rule, f"sbatch --cpus-per-task={8 * processes} or {fewer}")
