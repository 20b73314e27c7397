"""What runs inside a reward process: rows in, scores out, a clock per row.

In: chunks of rows over a socket, as JSON. Out: their results, as JSON, after at most `FLUSH_SECONDS` of work.
Before each row the process notes the row and the time in shared memory, so that the parent knows at which row it died or hangs.
Imports are light on purpose: no torch, no Ray, so that a process is ready in a tenth of a second.
"""

from __future__ import annotations

import json
import math
import mmap
import signal
import struct
import time
from bdb import BdbQuit
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from hydraflow.errors import ConfigError
from hydraflow.rewards.custom import load_function
from hydraflow.rewards.functions import find_scorer

FLUSH_SECONDS = 0.02
NO_ROW = -1
"""The row before the first one of a chunk: functions are being loaded."""

Result = tuple[float | None, dict[str, float], str | None]
"""(score, more numbers, why it failed); no score when it failed."""


class RowTimeout(BaseException):
    """The row's time is over. Not an Exception, so that a reward function's own `except Exception` lets it pass."""


class Progress:
    """The row a process is at and since when, in 16 bytes of memory shared with the parent."""

    def __init__(self, descriptor: int):
        self._memory = mmap.mmap(descriptor, 16)

    def note(self, row: int, now: float) -> None:
        """Notes that `row` (number in the chunk) began at `now` (time.monotonic, one clock for all processes)."""
        struct.pack_into("d", self._memory, 8, now)  # time first: a reader in between sees an old row with a new time
        struct.pack_into("q", self._memory, 0, row)

    def read(self) -> tuple[int, float]:
        """(row, since when)."""
        return struct.unpack_from("qd", self._memory, 0)  # type: ignore[return-value]

    def close(self) -> None:
        """Gives the memory back."""
        self._memory.close()


def main(socket: int, shared: int) -> None:
    """Serves chunks from `socket` until the parent closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches the whole process group; the parent ends its children
    parent, progress = Connection(socket), Progress(shared)
    try:
        settings = json.loads(parent.recv_bytes())
        try:
            call = load(settings)
        except ConfigError as error:
            parent.send_bytes(json.dumps({"refused": [p.rule for p in error.problems]}).encode())
            return
        parent.send_bytes(json.dumps({"ready": True}).encode())
        while True:
            _score_chunk(json.loads(parent.recv_bytes()), call, settings["timeout"], parent, progress)
    except (EOFError, ConnectionError):
        return  # the parent has closed the pool or is gone


def load(settings: dict[str, Any]) -> Callable[..., Any]:
    """The function to call with (data_source, solution_str, ground_truth, extra_info)."""
    if settings["path"] is None:
        return _built_in
    function = load_function(settings["path"], settings["name"], settings["reward_kwargs"])
    kwargs = settings["reward_kwargs"]

    def call(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Any:
        return function(data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info, **kwargs)

    return call


def _built_in(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Any:
    return find_scorer(data_source)(solution_str, ground_truth)


def _score_chunk(rows: Sequence[Any], call: Callable[..., Any], limit: float, parent: Connection, progress: Progress) -> None:
    if call is _built_in:
        _preload({row[0] for row in rows})
    results: list[Result] = []
    flushed = time.monotonic()
    for number, row in enumerate(rows):
        now = time.monotonic()
        if results and now - flushed > FLUSH_SECONDS:
            parent.send_bytes(json.dumps(results).encode())
            results, flushed = [], now
        progress.note(number, now)
        results.append(score_row(call, row, limit))
    parent.send_bytes(json.dumps(results).encode())


def _preload(data_sources: set[str]) -> None:
    """Imports what the functions need, so that no row's time pays for it. Unknown sources fail row by row."""
    for source in data_sources:
        try:
            find_scorer(source)
        except ConfigError:
            continue


def score_row(call: Callable[..., Any], row: Sequence[Any], limit: float) -> Result:
    """Calls the function for at most `limit` seconds and reads what it returned. Never raises."""
    try:
        # Armed anew for each row: a reward function may itself have used the alarm clock.
        signal.signal(signal.SIGALRM, _on_alarm)
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            value = call(*row)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except RowTimeout:
        return None, {}, f"took longer than {limit:g} seconds"
    except ConfigError as error:
        return None, {}, str(error.problems[0])
    except BaseException as error:  # the user's code may raise anything, SystemExit included: the row fails, never the run
        return None, {}, f"{type(error).__name__}: {error}"[:500]
    return read_value(value)


def score_here(call: Callable[..., Any], rows: Sequence[Any]) -> list[Result]:
    """Scores rows in this process, without a time limit. A row whose function raises fails; leaving a debugger ends the run."""
    results: list[Result] = []
    for row in rows:
        try:
            value = call(*row)
        except BdbQuit:
            raise
        except ConfigError as error:
            results.append((None, {}, str(error.problems[0])))
        except Exception as error:  # as in a process of its own: the row fails, never the run
            results.append((None, {}, f"{type(error).__name__}: {error}"[:500]))
        else:
            results.append(read_value(value))
    return results


def read_value(value: Any) -> Result:
    """A score from a number or a dict with 'score'; of the dict's other fields, the numbers are kept.

    >>> read_value({"score": 1, "acc": True, "pred": "42"})
    (1.0, {'acc': 1.0}, None)
    """
    if not isinstance(value, dict):
        return _finite(value, {})
    if "score" not in value:
        return None, {}, f"returned a dict without 'score' (it has {', '.join(map(str, value)) or 'nothing'})"
    numbers = {str(name): _number(field) for name, field in value.items() if name != "score"}
    return _finite(value["score"], {name: number for name, number in numbers.items() if number is not None and math.isfinite(number)})


def _finite(value: Any, extra: dict[str, float]) -> Result:
    score = _number(value)
    if score is None:
        return None, {}, f"returned a {type(value).__name__}, not a number"
    if not math.isfinite(score):
        return None, {}, f"returned {score}, not a finite number"
    return score, extra, None


def _number(value: Any) -> float | None:
    """`value` as a float: Python and numpy numbers, tensors of no dimension. Text is not a number."""
    if not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # arrays and tensors with dimensions
        return None


def _on_alarm(signal_number: int, frame: FrameType | None) -> None:
    raise RowTimeout
