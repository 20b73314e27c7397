"""The main loop of a reward process: rows in, scores out, with a time limit per row and a memory limit.

In: chunks of rows over a socket. Out: their results, batched over at most `FLUSH_SECONDS` of work. Before
each row the process records the row and the time in shared memory, so that the pool knows on which row it
died or hung. Imports are light on purpose (no torch, no Ray): a process is ready in a tenth of a second.
"""

from __future__ import annotations

import io
import mmap
import os
import resource
import signal
import socket
import sys
import time
from bdb import BdbQuit
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from types import FrameType
from typing import Any, TypeVar

from hydraflow.errors import ConfigError, shown
from hydraflow.rewards.calling import RewardCall, config_of, load
from hydraflow.rewards.config import RewardConfig
from hydraflow.rewards.custom import BATCH_ARGUMENTS, absolute
from hydraflow.rewards.frames import FrameSocket
from hydraflow.rewards.functions import load_scorers
from hydraflow.rewards.row_time import QueueTime, over_at
from hydraflow.rewards.values import Result, read_value
from hydraflow.system.own_code import in_short, line_of
from hydraflow.system.tether import end_like, supervise

R = TypeVar("R")

FLUSH_SECONDS = 0.02
NO_ROW = -1
"""Row number before the first row of a chunk: the function is being loaded."""

PROGRESS_BYTES = 4 * 8


class RowTimeout(BaseException):
    """The row's time is up. Not an Exception: a function's own `except Exception` must not catch it."""


class RowProgress:
    """The current row of a process and its start time, in memory shared with the pool."""

    def __init__(self, descriptor: int):
        self._memory = mmap.mmap(descriptor, PROGRESS_BYTES)
        self._values = memoryview(self._memory).cast("d")

    def note(self, row: int, now: float, waited: float = 0.0, limit: float = 0.0) -> None:
        """Records that `row` (index in the chunk) started at `now` (time.monotonic, one clock for all
        processes), when the process had waited `waited` seconds for a CPU, and may take `limit` seconds.
        """
        # One store per value: struct.pack_into writes zeros first, and the pool would read a row that started
        # at 0. Times first: the pool may pair the old row with the new time, never the reverse.
        values = self._values
        values[1], values[2], values[3] = now, waited, limit
        values[0] = row

    def read(self) -> tuple[int, float, float, float]:
        """(row, start time, seconds waited before it, its time limit)."""
        values = self._values.tolist()
        for _ in range(10):  # until two reads agree: then they are usually of one `note`
            before, values = values, self._values.tolist()
            if values == before:
                break
        row, now, waited, limit = values
        return int(row), now, waited, limit

    def close(self) -> None:
        self._values.release()
        self._memory.close()


class RowAlarm:
    """Raises RowTimeout in the row that has used up its time."""

    def __init__(self, limit: float):
        self.limit = limit
        self._queue_time = QueueTime(os.getpid())
        self.began = self.waited = 0.0
        self._allowed = limit

    def start(self) -> None:
        """Notes the start of a row."""
        self.began, self.waited = time.monotonic(), self._queue_time.seconds()

    def arm(self, rows: int = 1) -> None:
        """Sets the alarm for `rows` rows; repeated for each batch, because a reward function may have used
        SIGALRM itself."""
        self._allowed = rows * self.limit
        signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, self._allowed)

    def disarm(self) -> None:
        """Cancels the alarm at the end of a row."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, signal_number: int, frame: FrameType | None) -> None:
        waited = self._queue_time.seconds() - self.waited
        left = over_at(self.began, self._allowed, waited) - time.monotonic()
        if left <= 0:
            raise RowTimeout
        signal.setitimer(signal.ITIMER_REAL, left)


class RewardCaller:
    """The reward function, called with its limits."""

    def __init__(self, config: RewardConfig, alarm: RowAlarm, progress: RowProgress):
        self.alarm, self.progress, self._max_memory = alarm, progress, config.max_memory
        self.call = load(config)
        self.at_once = self.call.at_once(config.max_concurrent)

    def failed(self, error: BaseException) -> Result:
        """The result of a row whose function raised."""
        if isinstance(error, RowTimeout):
            return None, {}, f"took longer than {self.alarm.limit:g} seconds"
        return None, {}, cause_of(error, self.call.paths) + _memory_limit(error, self._max_memory)

    def within_limits(self, number: int, rows: int, call: Callable[[], R]) -> R | Result:
        """Calls a function that scores `rows` rows from `number` on; the result of a failed row if it
        raises."""
        self.alarm.start()
        self.progress.note(number, self.alarm.began, self.alarm.waited, rows * self.alarm.limit)
        try:
            self.alarm.arm(rows)
            try:
                return call()
            finally:
                self.alarm.disarm()
        except BaseException as error:  # the user's code may raise anything: the row fails, never the run
            return self.failed(error)


def main(socket_number: int, shared: int) -> None:
    """Serves chunks from the socket until the pool closes it."""
    os.set_inheritable(socket_number, False)  # the function's child processes must not keep it open
    os.set_inheritable(shared, False)
    if isinstance(sys.stdout, io.TextIOWrapper):  # prints must arrive before the function hangs or dies
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    pool, progress = FrameSocket(socket.socket(fileno=socket_number)), RowProgress(shared)
    try:
        config = config_of(pool.receive())
        _limit_memory(config.max_memory)
        try:
            caller = RewardCaller(config, RowAlarm(config.timeout), progress)
        except ConfigError as error:
            pool.send({"refused": _refusal(error, config.max_memory)})
            return
        pool.send({"pid": os.getpid(), "at_once": caller.at_once})
        _serve(pool, caller)
    except (EOFError, ConnectionError):
        return  # the pool is closed, or its process is gone


def supervised(socket_number: int, shared: int, leash: int) -> None:
    """Runs `main` in a process of its own until it ends or the pool's process lets go of the leash
    (`system/tether.py`): nothing that the function has started outlives the pool. Exits as `main` did."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    end_like(supervise(lambda: main(socket_number, shared), leash, own=(socket_number, shared)))


def _serve(pool: FrameSocket, caller: RewardCaller) -> None:
    if not caller.call.is_async:
        while True:
            rows = pool.receive()
            if caller.call.by_source:
                load_scorers(row[0] for row in rows)
            _send(pool, _scored(caller.call, rows, caller.within_limits))
    from hydraflow.rewards.concurrent import serve  # asyncio is slow to import

    serve(pool, caller)


def _send(pool: FrameSocket, results: Iterable[tuple[int, Result]]) -> None:
    """Sends results as they arrive, batched if they are quick."""
    held: list[tuple[int, Result]] = []
    flushed = time.monotonic()
    for numbered in results:
        held.append(numbered)
        if (now := time.monotonic()) - flushed > FLUSH_SECONDS:
            pool.send(held)
            held, flushed = [], now
    if held:
        pool.send(held)


def _limit_memory(gib: float) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = int(gib * 2**30) if hard == resource.RLIM_INFINITY else min(int(gib * 2**30), hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _memory_limit(error: BaseException | None, gib: float) -> str:
    """What a message says besides the error."""
    return f"; the limit is reward.max_memory={gib:g} GiB" if isinstance(error, MemoryError) else ""


def _refusal(error: ConfigError, max_memory: float) -> list[list[str]]:
    """[field, value, rule, remedy] of each problem."""
    limit = _memory_limit(error.__cause__, max_memory)
    return [[one.field, shown(one.value), one.rule + limit, one.remedy] for one in error.problems]


def cause_of(error: BaseException, paths: Sequence[str]) -> str:
    """An exception, and the line in one of the user's files where it was raised."""
    if isinstance(error, ConfigError):
        return str(error.problems[0])
    places = ((path, line_of(error, absolute(path))) for path in paths)
    where = next((f" ({os.path.basename(path)}, {line})" for path, line in places if line), "")
    return in_short(error) + where


def score_here(call: RewardCall, rows: Sequence[Any]) -> list[Result]:
    """Scores rows in this process without limits. A row whose function raises, even SystemExit, fails.
    Quitting a debugger ends the run."""

    def guarded(number: int, count: int, score: Callable[[], R]) -> R | Result:
        try:
            return score()
        except BdbQuit:
            raise
        except (Exception, SystemExit) as error:  # as in a process of its own: the row fails, never the run
            return None, {}, cause_of(error, call.paths)

    return [result for _, result in _scored(call, rows, guarded)]


def _scored(
    call: RewardCall, rows: Sequence[Any], guarded: Callable[[int, int, Callable[[], Any]], Any]
) -> Iterator[tuple[int, Result]]:
    """Index and result of each row, scored one by one, or together by a function that takes batches. The rows
    of a failed batch are retried one by one, so that only those at fault fail. `guarded`: see
    `RewardCaller.within_limits`."""
    if call.is_batched and len(rows) > 1:
        together = guarded(0, len(rows), partial(_of_batch, call.function, rows))
        if isinstance(together, list):
            yield from enumerate(together)
            return
    for number, row in enumerate(rows):
        yield number, guarded(number, 1, partial(_of_one, call, row))


def _of_batch(function: Callable[..., Any], rows: Sequence[Any]) -> list[Result]:
    columns = map(list, zip(*rows, strict=True))
    values = list(function(**dict(zip(BATCH_ARGUMENTS, columns, strict=True))))
    if len(values) != len(rows):
        raise ValueError(f"returned {len(values)} scores for {len(rows)} rows")
    return [read_value(value) for value in values]


def _of_one(call: RewardCall, row: Any) -> Result:
    if call.is_batched:
        return _of_batch(call.function, [row])[0]
    value = call.of_row(row)
    return read_value(_runner().run(value) if call.is_async else value)


@cache
def _runner() -> Any:
    import asyncio  # slow to import, and most functions do not need it

    return asyncio.Runner()  # one for all rows: a function may keep connections in its event loop
