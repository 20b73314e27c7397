"""Runs an asynchronous reward function on several rows concurrently, in one process.

In: the rows of a chunk. Out: their results, each as soon as it is ready. Synchronous parts run one row at a
time, and between two rows the event loop resumes those that wait. A row that waits too long is cancelled; one
that blocks the event loop is interrupted by the alarm of `child.py`; if that does not help, the pool ends the
process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, NoReturn

from hydraflow.rewards.child import RewardCaller, RowTimeout
from hydraflow.rewards.frames import FrameSocket
from hydraflow.rewards.values import Result, read_value

BEAT = 0.25
"""Interval at which a live event loop resets the alarm, as a fraction of the time limit."""


def serve(pool: FrameSocket, caller: RewardCaller) -> NoReturn:
    """Scores chunks until the pool closes the socket. One event loop for all of them, because a function may
    keep connections in it."""
    with asyncio.Runner() as runner:
        rows = ConcurrentRows(pool, caller)
        while True:
            runner.run(rows.score(pool.receive()))


class ConcurrentRows:
    """The rows of one chunk after another."""

    def __init__(self, pool: FrameSocket, caller: RewardCaller):
        self.pool, self.caller = pool, caller
        self._gate, self._turn = asyncio.Semaphore(caller.at_once), asyncio.Lock()
        self._started: dict[int, tuple[float, float]] = {}
        """Active rows, oldest first: start time, and seconds waited for a CPU by then."""

    async def score(self, rows: Sequence[Any]) -> None:
        """Scores the rows of a chunk, and sends the result of each."""
        beat = asyncio.create_task(self._beat())
        try:
            await asyncio.gather(*(self._row(number, row) for number, row in enumerate(rows)))
        finally:
            beat.cancel()
            self.caller.alarm.disarm()

    async def _row(self, number: int, row: Sequence[Any]) -> None:
        async with self._gate:
            async with self._turn:  # the event loop runs before the next row starts
                self.caller.alarm.start()
                ends = asyncio.get_running_loop().time() + self.caller.alarm.limit
                self._started[number] = self.caller.alarm.began, self.caller.alarm.waited
                self._note()
                started = self._awaitable(row)
            result = await self._result(started, ends)
            del self._started[number]
            self._note()
            self.pool.send([(number, result)])

    def _awaitable(self, row: Sequence[Any]) -> Awaitable[Any] | Result:
        """What to await; or the result of a row that has already failed."""
        try:
            return self.caller.call.of_row(row)
        except BaseException as error:  # the user's code may raise anything: the row fails, never the run
            return self.caller.failed(error)

    async def _result(self, started: Awaitable[Any] | Result, ends: float) -> Result:
        if isinstance(started, tuple):
            return started
        try:
            async with asyncio.timeout_at(ends) as waiting:
                return read_value(await started)
        except BaseException as error:  # see above
            is_late = waiting.expired() and isinstance(error, TimeoutError)
            return self.caller.failed(RowTimeout() if is_late else error)

    def _note(self) -> None:
        """Records the oldest row, which the pool watches."""
        if self._started:
            number, (began, waited) = next(iter(self._started.items()))
            self.caller.progress.note(number, began, waited, self.caller.alarm.limit)

    async def _beat(self) -> None:
        while True:
            self.caller.alarm.start()
            self.caller.alarm.arm()
            await asyncio.sleep(BEAT * self.caller.alarm.limit)
