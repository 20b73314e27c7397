"""Dumps the stacks of every worker process, with all threads and child processes, when a deadline has passed.

In: the processes of a run. Out: a text file. py-spy reads a stack from outside, even if the process is
stopped or stuck in C code. Where py-spy is not installed or not permitted, a signal makes the process write
its own stacks to its log (faulthandler). Other machines are asked through Ray. Everything has a time limit,
because the run has already waited long enough.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hydraflow.system.role_logs import STACKS

log = logging.getLogger(__name__)

SPY_SECONDS = 10.0
"""Seconds for py-spy to read one process and its children."""
SIGNAL_SECONDS = 2.0
"""Seconds for a process to write its own stacks."""
NODE_SECONDS = 30.0
"""Seconds for all machines together."""
AT_ONCE = 8
"""Processes of a machine that are read at the same time."""


@dataclass(frozen=True)
class ProcessInfo:
    """Where a worker process runs, as it reported."""

    pid: int
    node_id: str
    """Ray's name of its machine."""
    worker_id: str
    """Ray's name of the process."""
    log: str
    """Where its standard error goes; not necessarily a file."""


@dataclass(frozen=True)
class NamedProcess:
    """A worker process with a readable name."""

    name: str
    facts: ProcessInfo


def spy() -> str | None:
    """The py-spy program; None where it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def write_stacks(folder: Path, why: str, processes: Sequence[NamedProcess]) -> str:
    """Writes the stacks of all processes to a new file in `folder`; returns its path, or why there is
    none."""
    if not processes:
        return "no worker process has reported its location yet"
    found = _of_all_nodes([process.facts for process in processes])
    parts = [f"{why}\n"]
    for process in sorted(processes, key=lambda process: process.name):
        stack = found.get(process.facts.worker_id, "its machine did not answer")
        parts.append(f"=== {process.name}, pid {process.facts.pid}\n{stack}\n")
    path = folder / f"{datetime.now().strftime('%Y%m%d-%H%M%S-%f')}.txt"
    try:
        path.write_text("\n".join(parts))
    except OSError as error:
        return f"they cannot be written: {error}"
    return str(path)


def _of_all_nodes(processes: Sequence[ProcessInfo]) -> dict[str, str]:
    """Stacks by worker id, gathered from all machines through Ray."""
    here = ray.get_runtime_context().get_node_id()
    by_node: dict[str, list[ProcessInfo]] = {}
    for process in processes:
        by_node.setdefault(process.node_id, []).append(process)
    remote = ray.remote(num_cpus=0, max_retries=0)(stacks_here)
    mine = by_node.pop(here, [])
    asked = [
        remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(there)
        for node, there in by_node.items()
    ]
    found = stacks_here(mine)
    answered = ray.wait(asked, num_returns=len(asked), timeout=NODE_SECONDS)[0] if asked else []
    for answer in answered:
        with suppress(ray.exceptions.RayError):
            found |= ray.get(answer)
    return found


def stacks_here(processes: Sequence[ProcessInfo]) -> dict[str, str]:
    """The stacks of processes of this machine, by worker id."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        stacks = list(pool.map(_stack, processes))
    return {process.worker_id: stack for process, stack in zip(processes, stacks, strict=True)}


def _stack(process: ProcessInfo) -> str:
    program = spy()
    if program is None:
        return _written_by_itself(process, "py-spy is not installed")
    for options in (["--subprocesses"], ["--nonblocking"]):  # a stopped process cannot be paused for reading
        result = _run([program, "dump", *options, "--pid", str(process.pid)])
        if result.returncode == 0:
            return result.stdout
    reason = result.stderr.strip() or "py-spy printed nothing"
    return _written_by_itself(process, reason.splitlines()[0])


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SPY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def _written_by_itself(process: ProcessInfo, why: str) -> str:
    """The stacks that the process writes to its log on the signal."""
    log_file = Path(process.log)
    if not log_file.is_file():
        return f"{why}; and it has no log file here"
    before = log_file.stat().st_size
    try:
        os.kill(process.pid, STACKS)
    except OSError as error:
        return f"{why}; and the process cannot be signalled: {error}"
    deadline = time.monotonic() + SIGNAL_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.1)
        with log_file.open("rb") as file:
            file.seek(before)
            text = file.read().decode(errors="replace")
        if "(most recent call first)" in text:
            return f"({why}; written by the process itself)\n{text}"
    return f"{why}; and the process wrote nothing in {SIGNAL_SECONDS:g} seconds: it is stopped"


def names_of(processes: Mapping[int, ProcessInfo], roles: Sequence[str]) -> list[NamedProcess]:
    """The processes of a group that have reported, named by its roles and their rank."""
    name = "+".join(roles)
    return [NamedProcess(f"{name} rank {rank}", facts) for rank, facts in sorted(processes.items())]
