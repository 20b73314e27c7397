"""What the batch system gave, put into the keys that were left open, and held against those that were not.

In: the leaves of a composition, an `Allocation`. Out: more leaves, with the variable as their origin; or
problems that name both sides. A key that the user set wins: less than the allocation is fine, more is a
contradiction. Left out on purpose: reading the variables (`system/allocation.py`), and memory, which
`memory/limits.py` compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hydraflow.errors import Problem
from hydraflow.schema import GenerateConfig, PPOConfig, SFTConfig
from hydraflow.system.allocation import Allocation

NODES, DEVICES, CPUS = "trainer.nnodes", "trainer.n_gpus_per_node", "ray_init.num_cpus"
CPU_PROCESSES = 2
"""As `trainer/machine.py`: worker processes of a machine without GPUs, where no number is given."""
BESIDE = 1
"""Processes that Ray counts a CPU for besides the training processes of a machine: the one of rewards and
advantages."""


def take(schema: type, leaves: dict[str, Any], origins: dict[str, str], given: Allocation | None) -> None:
    """Fills in what nobody set: nodes of a running cluster, GPUs, CPUs of a cluster of this run's own."""
    if given is None or schema not in (PPOConfig, SFTConfig, GenerateConfig):
        return
    local = leaves.get("ray_init.address", "local") == "local"
    found = {NODES: "nodes", DEVICES: "gpus", CPUS: "cpus"}
    if local:
        del found[NODES]  # a cluster of this run's own is one machine, whatever else the job was given
    if leaves.get("trainer.device") == "cpu":
        del found[DEVICES]
    if leaves.get("debug") or leaves.get("trainer.debug.local"):
        found = {
            key: field for key, field in found.items() if key == CPUS
        }  # what is debugged has one process for each role
    for key, field in found.items():
        value = getattr(given, field)
        if (
            value is None
            or key in origins
            or (key == CPUS and not (local and value >= _processes(leaves) + BESIDE))
        ):
            continue
        leaves[key], origins[key] = value, f"follows {given.source(field)}"


def _processes(leaves: Mapping[str, Any]) -> int:
    return int(leaves.get(DEVICES) or CPU_PROCESSES)


def contradictions(config: Any, given: Allocation | None) -> Iterator[Problem]:
    """What is asked for and was not given. Both sides are named, and how to change either."""
    if given is None or not isinstance(config, PPOConfig | SFTConfig | GenerateConfig):
        return
    trainer, on_gpus = config.trainer, given.gpus is not None and config.trainer.device != "cpu"
    if given.nodes is not None and trainer.nnodes > given.nodes:
        rule = f"Slurm gave job {given.job} {_count(given.nodes, 'node')} ({given.source('nodes')})"
        yield Problem(
            NODES, trainer.nnodes, rule, f"{NODES}={given.nodes} or sbatch --nodes={trainer.nnodes}"
        )
    if on_gpus and trainer.n_gpus_per_node is not None and trainer.n_gpus_per_node > (given.gpus or 0):
        rule = (
            f"Slurm gave job {given.job} {_count(given.gpus or 0, 'GPU')} on this node"
            f" ({given.source('gpus')})"
        )
        remedy = f"{DEVICES}={given.gpus} or sbatch --gpus-per-node={trainer.n_gpus_per_node}"
        yield Problem(DEVICES, trainer.n_gpus_per_node, rule, remedy)
    elif on_gpus and given.cpus is not None and config.ray_init.num_cpus is None:
        yield from _cores(trainer.n_gpus_per_node or given.gpus or 0, given)


def _cores(processes: int, given: Allocation) -> Iterator[Problem]:
    """A process for each GPU on a single core, Slurm's default, would wait for its core and not for its
    GPU."""
    assert given.cpus is not None
    if processes > given.cpus:
        rule = (
            f"as many processes share {_count(given.cpus, 'core')}: Slurm gave job {given.job} no more"
            f" ({given.source('cpus')})"
        )
        remedy = (
            f"sbatch --cpus-per-task={8 * processes} or {DEVICES}={given.cpus} or {CPUS}={processes + BESIDE}"
        )
        yield Problem(DEVICES, processes, rule, remedy)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
