"""The main loop of a reward process: rows in, scores out, with a time limit per row and a memory limit.

In: chunks of rows over a socket. Out: their results, after at most `FLUSH_SECONDS` of work. Before each row
the process notes the row and the time in shared memory, so that the pool knows at which row it died or hung.
Imports are light on purpose: no torch, no Ray, so that a process is ready in a tenth of a second.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import time
from bdb import BdbQuit
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from hydraflow.errors import ConfigError, Problem, shown
from hydraflow.rewards.custom import ARGUMENTS, line_of, load_function
from hydraflow.rewards.frames import FrameSocket
from hydraflow.rewards.functions import compute_score, unknown_sources
from hydraflow.rewards.row_time import QueueTime, over_at

FLUSH_SECONDS = 0.02
NO_ROW = -1
"""Row number before the first row of a chunk: the function is being loaded."""

_PROGRESS = struct.Struct("qdd")
PROGRESS_BYTES = _PROGRESS.size
MOST_CAUSE = 500
"""Maximum length of a reported error, in characters."""

Result = tuple[float | None, dict[str, float], str | None]
"""(score, other numbers, error); no score if it failed."""


class RowTimeout(BaseException):
    """The row's time is up. Not an Exception: a function's own `except Exception` must not catch it."""


class RowProgress:
    """The current row of a process and its start time, in memory shared with the pool."""

    def __init__(self, descriptor: int):
        self._memory = mmap.mmap(descriptor, PROGRESS_BYTES)

    def note(self, row: int, now: float, waited: float = 0.0) -> None:
        """Notes that `row` (number in the chunk) started at `now` (time.monotonic, one clock for all
        processes), when the process had waited `waited` seconds for a CPU.
        """
        # times first: a concurrent reader sees an old row with a new time
        struct.pack_into("dd", self._memory, 8, now, waited)
        struct.pack_into("q", self._memory, 0, row)

    def read(self) -> tuple[int, float, float]:
        """(row, start time, seconds waited before it)."""
        return _PROGRESS.unpack_from(self._memory, 0)  # type: ignore[return-value]

    def close(self) -> None:
        self._memory.close()


class RowAlarm:
    """Raises RowTimeout in the row that has used up its time."""

    def __init__(self, limit: float):
        self.limit = limit
        self._queue_time = QueueTime(os.getpid())
        self.began = self.waited = 0.0

    def start(self) -> None:
        """Notes the start of a row."""
        self.began, self.waited = time.monotonic(), self._queue_time.seconds()

    def arm(self) -> None:
        """Sets the alarm; needed for each row, because a reward function may itself have used it."""
        signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, self.limit)

    def disarm(self) -> None:
        """Cancels the alarm at the end of a row."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, signal_number: int, frame: FrameType | None) -> None:
        left = over_at(self.began, self.limit, self._queue_time.seconds() - self.waited) - time.monotonic()
        if left <= 0:
            raise RowTimeout
        signal.setitimer(signal.ITIMER_REAL, left)


class RewardCaller:
    """The user's function, or the built-in ones, with their limits."""

    def __init__(self, settings: dict[str, Any]):
        self.path: str | None = settings["path"]
        self.max_memory: float = settings["max_memory"]
        self.call = load(settings)

    def score_row(self, row: Sequence[Any], alarm: RowAlarm) -> Result:
        """Calls the function until `alarm` fires, and parses its result."""
        try:
            alarm.arm()
            try:
                value = self.call(*row)
            finally:
                alarm.disarm()
        except RowTimeout:
            return None, {}, f"took longer than {alarm.limit:g} seconds"
        except MemoryError as error:
            return None, {}, f"{_cause(error, self.path)}; {_memory_limit(self.max_memory)}"
        except BaseException as error:  # the user's code may raise anything: the row fails, never the run
            return None, {}, _cause(error, self.path)
        return read_value(value)


def main(socket_number: int, shared: int) -> None:
    """Serves chunks from the socket until the pool closes it."""
    os.set_inheritable(socket_number, False)  # the function's child processes must not keep it open
    os.set_inheritable(shared, False)
    if isinstance(sys.stdout, io.TextIOWrapper):  # its output must be flushed before it hangs or dies
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    pool, progress = FrameSocket(socket.socket(fileno=socket_number)), RowProgress(shared)
    try:
        settings = pool.receive()
        most = settings["max_memory"]
        _limit_memory(most)
        try:
            caller = RewardCaller(settings)
        except ConfigError as error:
            pool.send({"refused": [_in_words(problem, error, most) for problem in error.problems]})
            return
        alarm = RowAlarm(settings["timeout"])
        pool.send({"pid": os.getpid()})
        while True:
            _score_chunk(pool.receive(), caller, alarm, pool, progress)
    except (EOFError, ConnectionError):
        return  # the pool is closed, or its process is gone


def _limit_memory(gib: float) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = int(gib * 2**30) if hard == resource.RLIM_INFINITY else min(int(gib * 2**30), hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _memory_limit(gib: float) -> str:
    return f"the limit is reward.max_memory={gib:g} GiB"


def _in_words(problem: Problem, error: ConfigError, max_memory: float) -> list[str]:
    """(field, value, rule, remedy) of a problem."""
    limit = f"; {_memory_limit(max_memory)}" if isinstance(error.__cause__, MemoryError) else ""
    return [problem.field, shown(problem.value), problem.rule + limit, problem.remedy]


def _cause(error: BaseException, path: str | None) -> str:
    """An exception, and where in the user's file it was raised."""
    if isinstance(error, ConfigError):
        return str(error.problems[0])
    try:
        cause = f"{type(error).__name__}: {error}"
    except Exception:  # str() of it is the user's code, too
        cause = type(error).__name__
    line = line_of(error, path) if path is not None else ""
    return cause[:MOST_CAUSE] + (f" ({os.path.basename(path)}, {line})" if path is not None and line else "")


def load(settings: dict[str, Any]) -> Callable[..., Any]:
    """The function to call with the values of `ARGUMENTS`, in their order."""
    if settings["path"] is None:
        return compute_score
    function = load_function(settings["path"], settings["name"], settings["reward_kwargs"])
    kwargs = settings["reward_kwargs"]

    return lambda *row: function(**dict(zip(ARGUMENTS, row, strict=True)), **kwargs)


def _score_chunk(
    rows: Sequence[Any], caller: RewardCaller, alarm: RowAlarm, pool: FrameSocket, progress: RowProgress
) -> None:
    if caller.path is None:
        # imports what the functions need, so that it does not count against a row's time
        unknown_sources(row[0] for row in rows)
    results: list[Result] = []
    flushed = time.monotonic()
    for number, row in enumerate(rows):
        alarm.start()
        if results and alarm.began - flushed > FLUSH_SECONDS:
            pool.send(results)
            results, flushed = [], alarm.began
        progress.note(number, alarm.began, alarm.waited)
        results.append(caller.score_row(row, alarm))
    pool.send(results)


def score_here(call: Callable[..., Any], rows: Sequence[Any], path: str | None) -> list[Result]:
    """Scores rows in this process, without limits. A row whose function raises fails, SystemExit included;
    quitting a debugger ends the run.
    """
    results: list[Result] = []
    for row in rows:
        try:
            value = call(*row)
        except BdbQuit:
            raise
        except (Exception, SystemExit) as error:  # as in a process of its own: the row fails, never the run
            results.append((None, {}, _cause(error, path)))
        else:
            results.append(read_value(value))
    return results


def read_value(value: Any) -> Result:
    """A score from a number or a dict with 'score'; of the dict's other fields, the numbers are kept.

    >>> read_value({"score": 1, "acc": True, "pred": "42"})
    (1.0, {'acc': 1.0}, None)
    """
    fields = value if isinstance(value, dict) else {"score": value}
    if "score" not in fields:
        there = ", ".join(map(str, fields)) or "nothing"
        return None, {}, f"returned a dict without 'score' (it has {there})"
    score = _number(fields["score"])
    if score is None:
        return None, {}, f"returned a {type(fields['score']).__name__}, not a number"
    if not math.isfinite(score):
        return None, {}, f"returned {score}, not a finite number"
    numbers = {str(name): _number(field) for name, field in fields.items() if name != "score"}
    extra = {name: number for name, number in numbers.items() if number is not None and math.isfinite(number)}
    return score, extra, None


def _number(value: Any) -> float | None:
    """`value` as a float: Python and numpy numbers, tensors of no dimension. Text is not a number."""
    if not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # arrays and tensors with dimensions
        return None
