"""A small process between a pool and each process that runs a reward function, so that no process started by
the function outlives the pool.

In: descriptors of a socket to the pool, of shared memory, and of a leash: a socket whose other end only the
pool's process holds. Out: the function's own exit code or signal. The supervisor adopts all processes that
the function leaves behind (PR_SET_CHILD_SUBREAPER) and kills them when the function's process ends, or when
the leash closes: the pool has closed it, or its process is gone. If the supervisor is killed, the function's
process goes with it. Left out on purpose: a death signal from the pool, whose thread may end before it."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hydraflow.rewards import child

END_SECONDS = 5.0
"""Seconds to wait for killed processes: any left after that hang in the kernel and end when it lets them."""
_DEATH_SIGNAL, _CHILD_SUBREAPER = 1, 36
"""Constants of prctl(2)."""


def main(socket: int, shared: int, leash: int) -> None:
    """Starts the function's process and stays until it ends or the leash closes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool ends its processes
    _prctl(_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    function = os.fork()
    if function == 0:
        os.close(leash)
        _die_with(supervisor)
        os.setsid()  # so that a function that signals its own group does not hit the supervisor
        child.main(socket, shared)
        return
    os.close(socket)
    os.close(shared)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    status: int | None = None
    try:
        status = _watch(function, leash)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_descendants()
    _end_like(status)


def _watch(function: int, leash: int) -> int | None:
    """The wait status of the function's process; None when the leash closed first."""
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker)
    # without a handler nothing is written to `waker`
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        for pid, status in _ended():
            if pid == function:
                return status
        ready, _, _ = select.select([leash, woken], [], [])
        if leash in ready:
            return None
        os.read(woken, 4096)


def _ended() -> Iterator[tuple[int, int]]:
    """(pid, wait status) of children that have ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def _end_descendants() -> None:
    """Kills children until there are none; the children of a killed child become ours."""
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        for pid in Path("/proc/thread-self/children").read_text().split():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _end_like(status: int | None) -> None:
    """Exits as the function's process did, because the pool reads the reason from this process."""
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _die_with(parent: int) -> None:
    """Makes this process receive SIGKILL when its parent ends, even if that has already happened."""
    _prctl(_DEATH_SIGNAL, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
