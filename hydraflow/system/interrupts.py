"""How a command ends: cleanly on the first Ctrl-C, even if more follow, and with all its processes.

In: `command(main)` from an entry point, and `ending` around what ends a run. Out: the exit code of the
process.

    first Ctrl-C          KeyboardInterrupt, on which the run shuts down: trackers, Ray, summary, lock
    those right after it  ignored: they would interrupt the shutdown
    PATIENCE seconds later  one more kills all processes of the command, and it exits at once
    LIMIT seconds later     the same without one: a library or a disk hangs

Standard library only, and imported before anything else, so that Ctrl-C during the imports, which take a
second or two, prints no stack trace either. Left out on purpose: SIGTERM (`trainer/signals.py`), which comes
here when it is repeated.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from hydraflow.errors import EnvironmentFault, HydraflowError
from hydraflow.system.processes import stat_fields

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C and after a repeated SIGTERM; both end a sweep, too."""
REPEATS = 0.3
"""Seconds in which another Ctrl-C counts as the same: the first may not have reached its handler yet."""
PATIENCE = 5.0
"""Seconds for which a run's shutdown cannot be interrupted."""
LIMIT = 120.0
"""Seconds that a run's shutdown may take; its trackers get 30 of them."""
EXIT_LIMIT = 60.0
"""Seconds that Python may take to exit after that: it waits for threads, and libraries end their own
processes."""
KILL_SECONDS = 3.0
"""Seconds that `end_at_once` waits for killed processes to be gone."""
FOR_THE_COMMAND = (signal.SIGUSR1, signal.SIGHUP)
"""Signals that a batch system or a closed terminal sends to all processes of a command, and that only the
command itself handles."""
_ADOPT_ORPHANS = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""


@contextmanager
def blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Blocks the signals within the block; processes that are started there inherit the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ShutdownState:
    """Whether this process is shutting down, since when, and with which exit code."""

    def __init__(self) -> None:
        self.commanded = False
        """Whether this process is one of our commands, which may be killed, and not a program that imports
        the package."""
        self.code = INTERRUPTED
        """Exit code of the last interrupt."""
        self.since: float | None = None
        """When the shutdown started; None: it has not."""
        self.patience = PATIENCE
        self.result = INTERRUPTED
        """Exit code if the shutdown itself is interrupted."""
        self.message = ""
        """Why the run ended; printed in that case."""
        self.asked = False
        """Whether a signal has asked this process to stop at the next opportunity."""
        self.raised_at: float | None = None
        """When the last KeyboardInterrupt was raised; None: there was none."""

    def interrupt(self, code: int) -> None:
        """Called by signal handlers. Raises KeyboardInterrupt, does nothing, or kills the process, as
        described at the top of this file."""
        now = time.monotonic()
        if self.since is not None:
            if self.commanded and now - self.since > self.patience:
                end_at_once(self.result, "the shutdown was interrupted")
            return
        if self.raised_at is None or now - self.raised_at > REPEATS:
            self.raised_at, self.code = now, code
            raise KeyboardInterrupt


SHUTDOWN = ShutdownState()
"""The one instance of this process, since signals arrive per process."""


def command(main: Callable[[], int]) -> NoReturn:
    """Runs a command and exits with its exit code. Called once, by the main module."""
    SHUTDOWN.commanded = True
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # background jobs may ignore it
        signal.signal(signal.SIGINT, lambda number, frame: SHUTDOWN.interrupt(INTERRUPTED))
    try:
        code = main()
    except KeyboardInterrupt:
        code = say_interrupted()
    except SystemExit as wanted:
        if isinstance(wanted.code, str):
            print(wanted.code, file=sys.stderr)
        code = wanted.code if isinstance(wanted.code, int) else int(wanted.code is not None)
    _leave(code)


@contextmanager
def ending(error: BaseException | None) -> Iterator[None]:
    """Protects the block, which shuts a run down, from another Ctrl-C. `error`: what ended the run; None: it
    finished. May be nested."""
    if SHUTDOWN.since is not None:
        yield
        return
    SHUTDOWN.result = _code_of(error)
    SHUTDOWN.message = str(error) if isinstance(error, HydraflowError) else ""
    SHUTDOWN.since = time.monotonic()
    watch = _timer(LIMIT, SHUTDOWN.result, f"the shutdown took more than {LIMIT:g} seconds")
    if SHUTDOWN.commanded:
        watch.start()
    try:
        yield
    finally:
        watch.cancel()
        SHUTDOWN.since = None


def is_hidden_interrupt(error: BaseException | None) -> bool:
    """Whether the error is, or came from, a Ctrl-C that arrived while torch's argument parser was calling
    Python, for the size of a jagged tensor: the parser raises a TypeError, which only quotes the
    KeyboardInterrupt."""
    seen: list[BaseException] = []
    while SHUTDOWN.raised_at is not None and error is not None and error not in seen:
        if isinstance(error, TypeError) and "KeyboardInterrupt" in str(error):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def say_interrupted() -> int:
    """Prints that the command was interrupted; returns the exit code."""
    if SHUTDOWN.commanded:
        SHUTDOWN.since = time.monotonic()
    print("interrupted" if SHUTDOWN.code == INTERRUPTED else "ended by a repeated SIGTERM", file=sys.stderr)
    return SHUTDOWN.code


def end_at_once(code: int, why: str) -> NoReturn:
    """Kills all processes that this one started, then this one, without running any more Python. May be
    called from any thread."""
    os.write(2, f"{SHUTDOWN.message}\n{why}: ended at once\n".lstrip("\n").encode(errors="replace"))
    kill_family()
    os._exit(code)


def kill_family() -> None:
    """Kills all descendants of this process, also those whose parents have ended."""
    # children of a killed child become ours, so that the next round finds them
    ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)
    deadline = time.monotonic() + KILL_SECONDS
    while (family := _family()) and time.monotonic() < deadline:
        for pid in family:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _leave(code: int) -> NoReturn:
    """Exits; another Ctrl-C exits at once. After an interrupt the libraries' exit handlers, which wait and
    print, are skipped."""
    SHUTDOWN.result, SHUTDOWN.message, SHUTDOWN.since = code, "", time.monotonic()
    if code in (INTERRUPTED, TERMINATED):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # the reader of a pipe may be gone
                stream.flush()
        kill_family()
        os._exit(code)
    SHUTDOWN.patience = 0.0
    _timer(EXIT_LIMIT, code, f"Python has not exited in {EXIT_LIMIT:g} seconds").start()
    sys.exit(code)


def _timer(seconds: float, code: int, why: str) -> threading.Timer:
    timer = threading.Timer(seconds, end_at_once, (code, why))
    timer.daemon = True
    return timer


def _code_of(error: BaseException | None) -> int:
    """The exit code if the shutdown does not finish. After a finished run that is the environment's fault."""
    if isinstance(error, HydraflowError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return SHUTDOWN.code
    return EnvironmentFault.exit_code if error is None else 1


def _family() -> list[int]:
    """All descendants of this process that are alive."""
    parents = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            state, parent = stat_fields(int(entry.name))[:2]
            if state not in (b"Z", b"X"):
                parents[int(entry.name)] = int(parent)
    family: set[int] = set()
    found = {os.getpid()}
    while found:
        found = {pid for pid, parent in parents.items() if parent in found} - family
        family |= found
    return sorted(family)
