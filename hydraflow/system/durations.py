"""Times as people write them: seconds, or 90s, 8m, 1h30m.

In: what the user wrote. Out: seconds. Left out on purpose: days and dates.
"""

from __future__ import annotations

import re

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}


def seconds_of(value: object) -> float | None:
    """Seconds, above 0; None if the text is not a duration.

    >>> seconds_of("1h30m"), seconds_of(90), seconds_of("soon"), seconds_of(0)
    (5400.0, 90.0, None, None)
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if 0 < value < 1e18 else None  # an integer may be too large for a float
    text = str(value).strip().lower()
    parts = re.findall(r"(\d+(?:\.\d+)?)([hms])", text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return seconds_of(sum(float(number) * _UNITS[unit] for number, unit in parts))
    return seconds_of(float(text)) if re.fullmatch(r"\d+(\.\d+)?", text) else None
