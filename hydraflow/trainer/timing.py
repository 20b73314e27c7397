"""Seconds of each phase of a step, under the names users know: `timing_s/gen`, `timing_s/update_actor`, ...

In: phases as they run. Out: one number per phase and step, and spans for the timeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from codetiming import Timer

from hydraflow.dispatch.spans import Span, unix_time
from hydraflow.dispatch.timeline import Timeline
from hydraflow.system.role_logs import CONTROLLER


class PhaseTimer:
    """Collects the seconds of named phases until `drain`.

    >>> timer = PhaseTimer()
    >>> with timer.phase("gen"):
    ...     pass
    >>> list(timer.drain())
    ['timing_s/gen']
    """

    def __init__(self, timeline: Timeline | None = None, row: str = CONTROLLER) -> None:
        """`row`: the timeline row of the phases."""
        self._timeline, self._row = timeline or Timeline(), row
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[None]:
        """Times one phase; a phase that runs twice in a step adds up."""
        timer = Timer(logger=None)
        timer.start()
        assert timer._start_time is not None, "it was started"
        start = unix_time(timer._start_time)
        try:
            yield
        finally:
            key, seconds = f"timing_s/{name}", timer.stop()
            self._seconds[key] = self._seconds.get(key, 0.0) + seconds
            # by the same readings: it ends within the span around it, and lasts as long as its metric
            self._timeline.note(self._row, 0, [Span(name, start, seconds, step)])

    def drain(self) -> dict[str, float]:
        """Returns the seconds so far and resets."""
        seconds, self._seconds = self._seconds, {}
        return seconds
