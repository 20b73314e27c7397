"""What a process did and when: named spans of time, kept for the timeline.

In: `with span("optimizer_step"):` anywhere. Out: `Span`s, drained by the owner of the process's recorder;
in a process without one nothing is kept, at almost no cost. Start times are Unix times that advance with a
monotonic clock, so spans nest exactly. Left out on purpose: the trace file (`dispatch/timeline.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

MOST_SPANS = 300_000
"""Spans that a recorder keeps, the newest; trace viewers can barely open more."""
_UNIX_MINUS_MONOTONIC = time.time() - time.perf_counter()


class Span(NamedTuple):
    """A named interval of time."""

    name: str
    start: float
    """Unix time in seconds."""
    seconds: float
    step: int | None = None
    """Training step, where it is known."""
    role: str = ""
    """Its role; empty: the role of the current call."""


def now() -> float:
    """Unix time in seconds, which never goes back in this process."""
    return unix_time(time.perf_counter())


def unix_time(monotonic: float) -> float:
    """`now` at that value of time.perf_counter()."""
    return monotonic + _UNIX_MINUS_MONOTONIC


class SpanRecorder:
    """Keeps spans. Used by one thread.

    >>> recorder = SpanRecorder()
    >>> with recorder.span("gen"):
    ...     pass
    >>> [span.name for span in recorder.drain()]
    ['gen']
    """

    def __init__(self) -> None:
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)

    @contextmanager
    def span(self, name: str, role: str = "") -> Iterator[None]:
        """Records its body as a span, even if it raises."""
        start = now()
        try:
            yield
        finally:
            self._spans.append(Span(name, start, now() - start, None, role))

    def drain(self) -> list[Span]:
        """The spans so far, in the order in which they ended; resets the recorder."""
        spans = list(self._spans)
        self._spans.clear()
        return spans


_recorder: SpanRecorder | None = None


def record_into(recorder: SpanRecorder | None) -> None:
    """Sets this process's recorder; None: spans are dropped."""
    global _recorder
    _recorder = recorder


def span(name: str, role: str = "") -> AbstractContextManager[None]:
    """Records its body as a span of this process, if there is a recorder."""
    return nullcontext() if _recorder is None else _recorder.span(name, role)
