"""The resources of this job, from Slurm's environment variables: nodes, GPUs, cores and memory; and the
processes that torchrun has started.

In: the environment. Out: an `Allocation`, or None outside of a job. The only reader of these variables.
Standard library only. Left out on purpose: what a run needs (`batch_plan`), and how the two are compared
(`compose/allocated.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

JOB = "SLURM_JOB_ID"
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Allocation:
    """A job's share of a cluster; None if Slurm does not set a variable. GPUs, CPUs and memory are those of
    this process's node."""

    job: str
    nodes: int | None = None
    gpus: int | None = None
    cpus: int | None = None
    memory_bytes: int | None = None
    sources: Mapping[str, str] | None = None
    """Field -> the variable it was read from, with its value."""

    def source(self, field: str) -> str:
        """The field's variable and value, such as `SLURM_GPUS_ON_NODE=8`; for messages."""
        return (self.sources or {}).get(field, "Slurm")


def allocation(environ: Mapping[str, str] = os.environ) -> Allocation | None:
    """The job that this process belongs to.

    >>> allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURM_GPUS_PER_NODE": "h100:8"}).gpus
    8
    """
    if not environ.get(JOB):
        return None
    found = {
        "nodes": _first(environ, ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")),
        "gpus": _gpus(environ),
        "cpus": _first(environ, ("SLURM_CPUS_ON_NODE",)),
        "memory_bytes": _memory(environ),
    }
    sources = {field: f"{name}={environ[name]}" for field, (name, _) in found.items() if name}
    return Allocation(environ[JOB], sources=sources, **{field: value for field, (_, value) in found.items()})


def torchrun_processes(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """(nodes, processes per node) of the torchrun that started this process; None: it was not torchrun.

    >>> torchrun_processes({"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "8"})
    (2, 8)
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    return int(environ["GROUP_WORLD_SIZE"]), int(environ["LOCAL_WORLD_SIZE"])


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, int | None]:
    """The first variable that holds a number above 0."""
    for name in names:
        text = environ.get(name, "")
        if text.isdecimal() and int(text) > 0:
            return name, int(text)
    return "", None


def _gpus(environ: Mapping[str, str]) -> tuple[str, int | None]:
    """`8`, `h100:8`, `a100:2,h100:6`, or a list of device numbers."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        if counts := re.findall(r"(?:^|[:,])(\d+)(?=,|$)", environ.get(name, "")):
            return name, sum(map(int, counts))
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        if listed := environ.get(name, "").strip():
            return name, len(listed.split(","))
    return "", None


def _memory(environ: Mapping[str, str]) -> tuple[str, int | None]:
    """Slurm counts in mebibytes; 0 means all of the node's memory."""
    name, mebibytes = _first(environ, ("SLURM_MEM_PER_NODE",))
    if mebibytes:
        return name, mebibytes * MEBIBYTE
    name, mebibytes = _first(environ, ("SLURM_MEM_PER_CPU",))
    _, cpus = _first(environ, ("SLURM_CPUS_ON_NODE",))
    if mebibytes and cpus:
        return name, mebibytes * cpus * MEBIBYTE
    return "", None


def node_names(nodelist: str) -> list[str]:
    """The hosts of a Slurm node list, in its order. Raises ValueError if the list cannot be parsed.

    >>> node_names("gpu[01-03,7],login")
    ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login']
    """
    if nodelist.count("[") != nodelist.count("]"):
        raise ValueError(f"{nodelist!r} is not a list of nodes")
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        names += _expanded(part)
    return names


def _expanded(part: str) -> list[str]:
    """Expands one part of the list: the first bracket here, the others recursively."""
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]+)\](.*)", part)
    if match is None:
        return [part]
    head, ranges, tail = match.groups()
    names = []
    for piece in ranges.split(","):
        low, _, high = piece.partition("-")
        for number in range(int(low), int(high or low) + 1):
            names += _expanded(f"{head}{number:0{len(low)}d}{tail}")
    return names
