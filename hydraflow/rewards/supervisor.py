"""A small process between a pool and each process that runs a reward function, so that nothing the function
starts outlives the pool.

In: the numbers of a socket to the pool, of shared memory, and of a leash: a socket whose other end only the
pool's process holds. Out: the function's own exit code or signal. The supervisor adopts whatever the function
leaves behind (PR_SET_CHILD_SUBREAPER), whichever session or group it moved to, and kills all of it when the
function's process ends, or when the leash goes: then the pool has closed it, or the pool's process is gone,
SIGKILL included. Should the supervisor itself be killed, the function's process goes with it.
Left out on purpose: a death signal from the pool's process to the supervisor. It comes when the thread that
started it ends, and a pool may outlive that thread; the leash is tied to the process.
"""

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
from types import FrameType

from hydraflow.rewards import child

END_SECONDS = 5.0
"""After so long it no longer waits for processes that it has killed: they hang in the kernel, and end as soon
as that lets them."""
_DEATH_SIGNAL, _CHILD_SUBREAPER = 1, 36
"""Of prctl(2)."""


def main(socket: int, shared: int, leash: int) -> None:
    """Starts the function's process and stays until it ends or the leash goes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool ends its processes
    _prctl(_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    function = os.fork()
    if function == 0:
        os.close(leash)
        _die_with(supervisor)
        os.setsid()  # a function that signals its own group leaves the supervisor alone
        child.main(socket, shared)
        return
    os.close(socket)
    os.close(shared)
    signal.signal(signal.SIGTERM, _on_term)
    status: int | None = None
    try:
        status = _watch(function, leash)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_descendants()
    _end_like(status)


def _watch(function: int, leash: int) -> int | None:
    """The wait status of the function's process; None when the leash went first."""
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker)
    signal.signal(
        signal.SIGCHLD, lambda number, frame: None
    )  # without a handler nothing is written to `waker`
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
    """Kills children until there are none; those of a child that is killed become ours."""
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
    """Ends this process as the function's has ended, for the pool reads the reason here."""
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler to take away
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _die_with(parent: int) -> None:
    """From now on this process gets SIGKILL when its parent ends, also if that has happened already."""
    _prctl(_DEATH_SIGNAL, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _on_term(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
