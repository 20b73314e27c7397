"""How long a run may take: `trainer.max_wall_time` as seconds, or as 90s, 8m, 1h30m.

In: what the user wrote. Out: a deadline that the loop asks between steps.
"""

from __future__ import annotations

import re
import time

import psutil

from hydraflow.errors import ConfigError

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
    """Counts from its making; `limit` is in seconds, None for no limit."""

    def __init__(self, limit: float | None = None):
        self.started = time.monotonic()
        self.limit = limit

    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def seconds_since_launch(self) -> float:
        """Seconds since this process was started, its imports included."""
        return time.time() - psutil.Process().create_time()

    def is_over(self) -> bool:
        """Whether the limit has passed."""
        return self.limit is not None and self.seconds() >= self.limit
