"""Seconds of each phase of a step, under the names users know: `timing_s/gen`, `timing_s/update_actor`, ...

In: phases as they run. Out: one number per phase and step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from codetiming import Timer


class PhaseTimer:
    """Collects the seconds of named phases until `drain`.

    >>> timer = PhaseTimer()
    >>> with timer.phase("gen"):
    ...     pass
    >>> list(timer.drain())
    ['timing_s/gen']
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times one phase; a phase that runs twice in a step adds up."""
        timer = Timer(logger=None)
        timer.start()
        try:
            yield
        finally:
            key = f"timing_s/{name}"
            self._seconds[key] = self._seconds.get(key, 0.0) + timer.stop()

    def drain(self) -> dict[str, float]:
        """The seconds so far, and a new start."""
        seconds, self._seconds = self._seconds, {}
        return seconds
