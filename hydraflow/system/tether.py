"""Processes that do not outlive the one that asked for them, however it ends.

In: a leash, which is a socket whose other end only that process holds, and what to run. Out: how it ended.
Between the two is a supervisor. It adopts all processes that are left behind (PR_SET_CHILD_SUBREAPER) and
kills them when the program ends, or when the leash closes: it was closed, or the process that held it is
gone. If the supervisor is killed, the program goes with it. Left out on purpose: a parent-death signal,
because it is sent when the thread that asked ends, which may be before its process.

`Tethered` runs this file as a script for a program with a folder of its own. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

END_SECONDS = 5.0
"""Seconds to wait for killed processes: any left after that hang in a system call, and end with it."""
_DEATH_SIGNAL, _CHILD_SUBREAPER = 1, 36
"""Constants of prctl(2)."""


class Tethered:
    """A program that ends with this process, and its folder, which is then removed.

    Its supervisor is not a descendant of this process: it must outlive it, and Ray kills the children of a
    worker that ends.
    """

    def __init__(self, command: Sequence[str], *, folder: Path, log: int, env: Mapping[str, str]):
        """Starts it. log: the descriptor to which it prints."""
        self._leash, theirs = socket.socketpair()
        self._how, self._lock = "", threading.Lock()
        with theirs:
            subprocess.run(
                # -I: no module of the working folder or of PYTHONPATH replaces one of the standard library
                [sys.executable, "-I", __file__, str(theirs.fileno()), str(folder), *command],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(env),
                start_new_session=True,
                check=True,
            )

    def ended(self, seconds: float = 0.0) -> str:
        """How it ended, in a few words, waiting up to `seconds`; empty: it is still running."""
        with self._lock:
            if not self._how and _readable([self._leash.fileno()], seconds):
                # closed without a word: the supervisor was killed
                self._how = self._leash.recv(64).decode() or "with its supervisor"
            return self._how

    def end(self) -> None:
        """Ends it and everything that it has started."""
        with suppress(OSError):  # the other end is gone
            self._leash.shutdown(socket.SHUT_WR)
        self.ended(2 * END_SECONDS)


def main(leash: int, folder: str, command: Sequence[str]) -> None:
    """Runs the command in the background until it ends or the leash closes, and says there how it ended."""

    def run() -> None:
        os.execvp(command[0], list(command))

    if os.fork():  # the parent exits, so that the supervisor is not a descendant of the process that asked
        os._exit(0)
    try:
        status = supervise(run, leash)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    with suppress(OSError):  # the reader may be gone
        os.write(leash, (f"signal {-code}" if code < 0 else f"exit code {code}").encode())


def supervise(run: Callable[[], None], leash: int, *, own: Sequence[int] = ()) -> int | None:
    """The wait status of a process that calls `run`; None if the leash closed first. Leaves none of its
    processes behind.

    own: descriptors that only that process keeps.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the process that asked closes the leash
    _prctl(_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(leash)
        _die_with(supervisor)
        os.setsid()  # so that a program that signals its own group does not hit the supervisor
        run()
        sys.exit()
    for descriptor in own:
        os.close(descriptor)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return _watch(child, leash)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_descendants()


def end_like(status: int | None) -> None:
    """Exits as a process with this wait status did, because the process that started this one reads the
    reason from it."""
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _watch(child: int, leash: int) -> int | None:
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker)
    # a handler is needed, otherwise nothing is written to `waker`
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        for pid, status in _ended():
            if pid == child:
                return status
        if leash in _readable([leash, woken]):
            return None
        os.read(woken, 4096)


def _readable(descriptors: Sequence[int], seconds: float | None = None) -> list[int]:
    """Waits for one of them, with no limit for None. `select` would refuse numbers above 1,023."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if seconds is None else 1000 * seconds)]


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


def _die_with(parent: int) -> None:
    """Makes this process receive SIGKILL when its parent ends, even if that has already happened."""
    _prctl(_DEATH_SIGNAL, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
