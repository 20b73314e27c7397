"""How a command ends: in good order on the first Ctrl-C, whatever follows it, and with all its processes.

In: `command(main)` from an entry point, and `ending` around what ends a run. Out: the exit code of the
process.

    first Ctrl-C          KeyboardInterrupt, from which the run ends itself: trackers, Ray, summary, lock
    those right after it  ignored: they would cut the end short
    PATIENCE seconds into the end    one more kills all processes of the command, and it ends at once
    LIMIT seconds into the end       the same without one: a library or a disk hangs

Standard library only, and imported before anything else, so that Ctrl-C during the imports of a second or two
is quiet, too. Left out on purpose: SIGTERM (`trainer/signals.py`), which comes here when it is repeated.
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
from types import FrameType
from typing import NoReturn

from hydraflow.errors import EnvironmentFault, HydraflowError

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C and after a repeated SIGTERM; both end a sweep, too."""
REPEATS = 0.3
"""Seconds in which another Ctrl-C is the same one: the first is on its way to whoever cleans up."""
PATIENCE = 5.0
"""Seconds for which the end of a run cannot be interrupted."""
LIMIT = 120.0
"""Seconds that the end of a run may take; its trackers get 30 of them."""
EXIT_LIMIT = 60.0
"""Seconds that Python may take to leave after that: it waits for threads, and libraries end their own
processes."""
KILL_SECONDS = 3.0
"""What the end at once waits for killed processes to be gone."""
_ADOPT_ORPHANS = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""


class Ends:
    """What is known about the end of this process."""

    def __init__(self) -> None:
        self.commanded = False
        """Whether this process is a command of ours, which may be ended at once; not a program that uses the
        package."""
        self.code = INTERRUPTED
        """Exit code of what was interrupted last."""
        self.since: float | None = None
        """When the end began; None: it has not."""
        self.patience = PATIENCE
        self.result = INTERRUPTED
        """Exit code when this end is cut short."""
        self.told = ""
        """What must be said then: why the run ended."""
        self.asked = False
        """Whether a signal has asked this process to end in its own time."""
        self._raised = -REPEATS

    def interrupt(self, code: int) -> None:
        """For signal handlers. Raises KeyboardInterrupt, does nothing, or ends the process, as the head of
        this file says."""
        now = time.monotonic()
        if self.since is not None:
            if self.commanded and now - self.since > self.patience:
                end_at_once(self.result, "the end was interrupted")
            return
        if now - self._raised > REPEATS:
            self._raised, self.code = now, code
            raise KeyboardInterrupt


ENDS = Ends()
"""Of this process: signals are the process's, too."""


def command(main: Callable[[], int]) -> NoReturn:
    """Runs a command and leaves with its exit code. To be called once, by the main module."""
    ENDS.commanded = True
    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):  # a shell may have it ignored in a background job
        signal.signal(signal.SIGINT, _on_sigint)
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
    """Its body ends a run that `error` ended (None: it was done), which one Ctrl-C more shall not cut short.
    May be nested."""
    if ENDS.since is not None:
        yield
        return
    ENDS.result, ENDS.told = _code_of(error), str(error) if isinstance(error, HydraflowError) else ""
    ENDS.since = time.monotonic()
    watch = threading.Timer(LIMIT, end_at_once, (ENDS.result, f"the end took more than {LIMIT:g} seconds"))
    watch.daemon = True
    if ENDS.commanded:
        watch.start()
    try:
        yield
    finally:
        watch.cancel()
        ENDS.since = None


def say_interrupted() -> int:
    """Says so; returns the exit code. Of a command nothing is left to interrupt then."""
    if ENDS.commanded:
        ENDS.since = time.monotonic()
    print("interrupted" if ENDS.code == INTERRUPTED else "ended by a repeated SIGTERM", file=sys.stderr)
    return ENDS.code


def end_at_once(code: int, why: str) -> NoReturn:
    """Kills all processes that this one started, and ends it without another line of Python. From any
    thread."""
    os.write(2, f"{ENDS.told}\n{why}: ended at once\n".lstrip("\n").encode(errors="replace"))
    kill_family()
    os._exit(code)


def kill_family() -> None:
    """Kills all processes that this one started, directly or not, also those whose parents end before
    them."""
    ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)
    deadline = time.monotonic() + KILL_SECONDS
    while (family := _family()) and time.monotonic() < deadline:
        for pid in family:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _leave(code: int) -> NoReturn:
    """Ends this process; one more Ctrl-C does it at once. After an interrupt libraries' own ends, which wait
    and talk, are skipped."""
    ENDS.result, ENDS.told, ENDS.since = code, "", time.monotonic()
    if code in (INTERRUPTED, TERMINATED):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # whoever read it may be gone
                stream.flush()
        kill_family()
        os._exit(code)
    ENDS.patience = 0.0
    watch = threading.Timer(EXIT_LIMIT, end_at_once, (code, f"Python has not left in {EXIT_LIMIT:g} seconds"))
    watch.daemon = True
    watch.start()
    sys.exit(code)


def _on_sigint(number: int, frame: FrameType | None) -> None:
    ENDS.interrupt(INTERRUPTED)


def _code_of(error: BaseException | None) -> int:
    if isinstance(error, HydraflowError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return ENDS.code
    return EnvironmentFault.exit_code if error is None else 1


def _family() -> list[int]:
    """The living processes below this one."""
    parents = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with suppress(OSError), open(f"/proc/{entry.name}/stat") as stat:
            state, parent = stat.read().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(entry.name)] = int(parent)
    family: set[int] = set()
    found = {os.getpid()}
    while found:
        found = {pid for pid, parent in parents.items() if parent in found} - family
        family |= found
    return sorted(family)
