"""Ray's processes on this machine: finds those that this process started, and leaves none behind.

In: this process's Ray. Out: its processes, with everything below them: workers, agents, what workers started.
Left out on purpose: processes of a cluster that was started elsewhere; they end with that cluster.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import psutil
from ray._private import worker as ray_worker

from hydraflow.dispatch.template import forked_workers

GRACE = 3.0
"""Seconds for processes to exit by themselves once Ray has asked them to; Ray's agents would take a
minute."""
KILL_SECONDS = 5.0
"""Seconds to wait for killed processes."""


def own_ray_processes() -> list[psutil.Process]:
    """Ray's live processes. Call it while Ray runs: the children of an exited process cannot be found."""
    node = ray_worker._global_node
    if node is None:
        return []
    found = forked_workers()
    for pid in [info.process.pid for infos in node.all_processes.values() for info in infos]:
        with suppress(psutil.NoSuchProcess):
            found += [one := psutil.Process(pid), *one.children(recursive=True)]
    return found


def end_processes(processes: Sequence[psutil.Process], grace: float = GRACE) -> None:
    """Waits until they have ended, and kills those that have not after `grace` seconds."""
    _wait(processes, grace)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _wait(processes, KILL_SECONDS)


def _wait(processes: Sequence[psutil.Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(map(lives, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)


def lives(process: psutil.Process) -> bool:
    """Whether a process runs. A zombie counts as ended, because its parent may never reap it."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
