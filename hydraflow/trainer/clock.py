"""When a run must stop: `trainer.max_wall_time` (seconds, or 90s, 8m, 1h30m) is over, or a signal arrived.

In: the configured limit, and the signals that batch systems send. Out: the reason to stop, checked between
steps, and whether a step must be abandoned.
"""

from __future__ import annotations

import time

import psutil

from hydraflow.system.durations import seconds_of
from hydraflow.tracking.endings import OUT_OF_TIME, RECEIVED
from hydraflow.trainer.signals import StopSignals


def parse_duration(value: object) -> float | None:
    """`trainer.max_wall_time` in seconds, None for no limit; `compose/rules.py` rejects anything else.

    >>> parse_duration("1h30m"), parse_duration(None)
    (5400.0, None)
    """
    if value is None:
        return None
    if isinstance(value, float) and value <= 0:
        return 0.0  # a restart may have no time left
    seconds = seconds_of(value)
    assert seconds is not None, value
    return seconds


GRACE_PERIOD = 3.0
"""Seconds after a SIGTERM within which a step must reach its updates, else it is abandoned. Updates that have
started are always finished. Batch systems send SIGKILL after ten seconds or more."""


class GracePeriodOver(Exception):
    """The run must end now, without finishing the step."""


class Clock:
    """Measures time from its creation. `limit`: in seconds, None for no limit. `signals` may also end the
    run."""

    def __init__(self, limit: float | None = None, signals: StopSignals | None = None):
        self.started = time.monotonic()
        self.limit = limit
        self.signals = signals or StopSignals()

    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def seconds_since_launch(self) -> float:
        """Seconds since this process was started, its imports included."""
        return time.time() - psutil.Process().create_time()

    @property
    def preempted(self) -> bool:
        """Whether a signal asked the run to save and end."""
        return bool(self.signals.received)

    def check_grace_period(self) -> None:
        """Raises GracePeriodOver once GRACE_PERIOD seconds have passed since a SIGTERM."""
        terminated = self.signals.terminated_at
        if terminated is not None and time.monotonic() - terminated > GRACE_PERIOD:
            raise GracePeriodOver

    def why_to_stop(self) -> str:
        """The reason, for the log; empty while there is time left."""
        if self.preempted:
            return f"{self.signals.received}{RECEIVED}"
        return OUT_OF_TIME if self.limit is not None and self.seconds() >= self.limit else ""
