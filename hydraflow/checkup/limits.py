"""Limits of the system: CPUs that this process may really use, and what Ray can run out of: shared memory,
open files, space for its temporary files.

In: this machine, and the processes and threads that the run starts on it. Out: findings. In most
cases Ray starts anyway, and is then slow or fails much later.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import CheckSkipped, Finding, note, ok, problem, warning
from hydraflow.device import core_limits
from hydraflow.errors import EnvironmentFault
from hydraflow.memory.limits import host_memory
from hydraflow.memory.report import size_text
from hydraflow.system.node_folder import RAY_BASE, session_folder
from hydraflow.trainer.machine import Machine

STORE_SHARE, STORE_MOST, STORE_FLOOR = 0.3, 200 * 10**9, 10**10
"""Ray's object store: share of the memory, largest size in bytes, and the size below which it does not shrink
with /dev/shm."""
SHM_USED = 0.95
FILES_BASE, FILES_PER_PROCESS, FILES_ADVISED = 52, 6, 4096
"""Descriptors that Ray's node process holds open, how many more per worker process, and what Ray advises (it
warns below). Measured: with 2 training processes Ray starts under a limit of 64 and fails under 52 (Failed to
register worker to Raylet); with 8 it holds 97."""
DISK_FULL = 0.95
"""Used share of the disk of its temporary folder at which Ray stops storing objects."""


def check_processors(context: CheckContext) -> Iterator[Finding]:
    """Worker processes times threads must not exceed the cores, and Ray must not count more cores than there
    are."""
    yield judge_processors(core_limits(), context.machine, ray_cpus=context.config.ray_init.num_cpus)


def judge_processors(limits: Mapping[str, float], machine: Machine, *, ray_cpus: int | None) -> Finding:
    """`limits`: source of a limit -> number of cores. `ray_cpus`: ray_init.num_cpus."""
    source, least = min(limits.items(), key=lambda limit: limit[1])
    cores, each = max(1, int(least)), machine.threads
    each_limit = ", ".join(f"{name} {amount:g}" for name, amount in limits.items())
    seen = f"{least:g} cores by {source} ({each_limit})"
    threads = "1 thread" if each == 1 else f"{each} threads"
    busy = f"{machine.processes_per_node} training processes of {threads}"
    if ray_cpus is not None and ray_cpus > cores:
        evidence = f"ray_init.num_cpus={ray_cpus} is more than {seen}: Ray starts workers for all of them"
        return warning(evidence, f"ray_init.num_cpus={cores}")
    if machine.processes_per_node * each <= cores:
        return ok(f"{busy} on {seen}")
    if each == 1:
        once = f"trainer.n_gpus_per_node={cores} uses each core once"
        return note(f"{busy} on {seen}: they take turns", once)
    fitting = max(1, cores // machine.processes_per_node)
    evidence = f"{busy} are more than {seen}: they will slow each other down"
    return warning(evidence, f"trainer.threads_per_process={fitting}")


def check_shared_memory(context: CheckContext) -> Iterator[Finding]:
    """Ray keeps objects in /dev/shm, or in a slow file when it is too small."""
    if context.config.ray_init.address != "local":
        address = f"ray_init.address={context.config.ray_init.address}"
        raise CheckSkipped(f"the object store belongs to the cluster at {address}")
    yield judge_shared_memory(Path("/dev/shm"), available_memory=host_memory().available)


def judge_shared_memory(folder: Path, *, available_memory: int) -> Finding:
    """`folder`: where shared memory is mounted. `available_memory`: bytes of host memory that are free."""
    if not folder.is_dir():
        slow = "Ray's object store will use slow files in its temporary folder"
        return warning(f"there is no {folder}: {slow}", "mount a tmpfs there")
    free = shutil.disk_usage(folder).free
    store = object_store_bytes(available_memory, free)
    if store <= free:
        most = f"Ray's object store will take up to {size_text(store)}"
        return ok(f"{folder} has {size_text(free)} free; {most}")
    wish = f"{folder} has {size_text(free)} free, Ray's object store needs {size_text(store)}"
    remedy = f"docker run --shm-size={store * 11 // 10 // 2**30 + 1}g, or mount -o remount,size=... {folder}"
    return warning(f"{wish}: it will use slow files in Ray's temporary folder", remedy)


def object_store_bytes(available_memory: int, shm_free: int) -> int:
    """Default size of a local Ray's object store, in bytes.

    >>> object_store_bytes(100 * 10**9, 64 * 10**6), object_store_bytes(10 * 10**9, 64 * 10**6)
    (10000000000, 3000000000)
    """
    cap = min(STORE_MOST, max(STORE_FLOOR, int(shm_free * SHM_USED)))
    return min(int(available_memory * STORE_SHARE), cap)


def check_open_files(context: CheckContext) -> Iterator[Finding]:
    """The hard limit decides, because Ray raises the soft limit to it (at most 65536)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield judge_open_files(soft, hard, processes=context.machine.processes_per_node)


def judge_open_files(soft: int, hard: int, *, processes: int) -> Finding:
    """Limits on open files of a process, against the worker processes on this machine."""
    needed = FILES_BASE + FILES_PER_PROCESS * processes
    most = float("inf") if hard == resource.RLIM_INFINITY else hard
    seen = f"limit on open files: {_limit(soft)}, can be raised to {_limit(hard)}"
    remedy = f"ulimit -n {FILES_ADVISED} as root, or nofile in limits.conf"
    if most < needed:
        return problem(f"{seen}; Ray and {processes} training processes need about {needed}", remedy)
    if most < FILES_ADVISED:
        return warning(f"{seen}; below {FILES_ADVISED} Ray may lose connections", remedy)
    return ok(seen)


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else str(value)


def check_temporary_files(context: CheckContext) -> Iterator[Finding]:
    """The disk for Ray's sessions and spilled objects."""
    base = Path(os.environ.get(RAY_BASE) or tempfile.gettempdir())
    yield judge_temporary_files(base)
    if context.config.ray_init.address != "local" or not os.access(base, os.W_OK):
        return
    try:
        session_folder()
    except EnvironmentFault as error:
        yield problem(str(error), "RAY_TMPDIR=<a folder of yours>")


def judge_temporary_files(folder: Path, *, full: float = DISK_FULL) -> Finding:
    """`full`: the used share of the disk at which Ray stops storing objects."""
    remedy = "make room, or RAY_TMPDIR=<a folder on a larger disk>"
    if not os.access(folder, os.W_OK):
        return problem(f"{folder} cannot be written: Ray keeps its session there", remedy)
    disk = shutil.disk_usage(folder)
    used = 1 - disk.free / disk.total
    seen = f"{folder}: {size_text(disk.free)} free, {used:.0%} used"
    return warning(f"{seen}; at {full:.0%} Ray stops storing objects", remedy) if used >= full else ok(seen)
