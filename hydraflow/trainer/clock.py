"""How long a run may take: `trainer.max_wall_time` as seconds, or as 90s, 8m, 1h30m; and until a signal ends it.

In: what the user wrote, and the signals that batch systems send. Out: what the loop asks between steps.
"""

from __future__ import annotations

import re
import time

import psutil

from hydraflow.errors import ConfigError
from hydraflow.tracking.endings import OUT_OF_TIME, RECEIVED
from hydraflow.trainer.signals import StopSignals

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}


def parse_duration(value: object) -> float | None:
    """Seconds, or None for no limit.

    >>> parse_duration("1h30m"), parse_duration(90), parse_duration(None)
    (5400.0, 90.0, None)
    """
    if value is None:
        return None
    text = str(value).strip().lower()
    parts = re.findall(r"(\d+(?:\.\d+)?)([hms])", text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    elif re.fullmatch(r"\d+(\.\d+)?", text):
        seconds = float(text)
    else:
        seconds = 0.0
    if seconds <= 0:
        rule = "must be a positive time: seconds, or 90s, 8m, 1h30m"
        raise ConfigError.one("trainer.max_wall_time", value, rule, "trainer.max_wall_time=8m")
    return seconds


class Clock:
    """Counts from its making; `limit` is in seconds, None for no limit. `signals`: those that end the run, too."""

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

    def why_to_stop(self) -> str:
        """For people; empty while there is time left."""
        if self.preempted:
            return f"{self.signals.received}{RECEIVED}"
        return OUT_OF_TIME if self.limit is not None and self.seconds() >= self.limit else ""

    def is_over(self) -> bool:
        """Whether the limit has passed or a signal has come."""
        return bool(self.why_to_stop())
