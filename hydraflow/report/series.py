"""Curves small enough for a page: every point if there are few, else mean, minimum and maximum of equal
spans of steps.

In: columns of one or more runs. Out: plain values for the page's script. Nothing is smoothed or silently
left out: a span's minimum and maximum are drawn with its mean, and a page says how long its spans are.
Numbers are rounded to four digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hydraflow.report.reading import MetricColumn, Numbers

POINTS = 12_000
"""Largest number of points on a page; each takes about 25 bytes."""
MOST, LEAST = 400, 40
"""Range of the limit on a curve's points, whatever the number of curves."""


def points_per_curve(curves: int) -> int:
    """How many points each of a page's curves may have.

    >>> points_per_curve(3), points_per_curve(60), points_per_curve(1000)
    (400, 200, 40)
    """
    return max(LEAST, min(MOST, POINTS // max(1, curves)))


@dataclass
class Axes:
    """The positions that curves share; most metrics of a run have the same."""

    known: dict[tuple[bytes, bytes, int], int] = field(default_factory=dict)
    listed: list[dict[str, Any]] = field(default_factory=list)
    """`s`: steps, `t`: minutes, `w`: steps that a point represents."""

    def place(self, steps: Numbers, seconds: Numbers, width: int) -> int:
        """The index of these positions in `listed`, to which they are added if they are new."""
        key = (steps.tobytes(), seconds.tobytes(), width)
        if key not in self.known:
            self.known[key] = len(self.listed)
            self.listed.append({"s": steps.tolist(), "t": rounded(seconds / 60), "w": width})
        return self.known[key]


def spans_of(steps: Numbers, most: int) -> tuple[Numbers, int]:
    """At most `most` spans of equal width: the index of each one's first point, and the width in steps (1:
    every point is a single step).

    >>> spans_of(np.arange(10, 20), 3)
    (array([0, 4, 8]), 4)
    """
    if len(steps) <= most:
        return np.arange(len(steps)), 1
    first, last = int(steps[0]), int(steps[-1])
    width = -(-(last - first + 1) // most)
    numbers = (steps - first) // width
    return np.flatnonzero(np.diff(numbers, prepend=-1)), width


def curve(column: MetricColumn, axes: Axes, most: int) -> dict[str, Any]:
    """`x`: index of its axis, `y`: values, with `lo` and `hi` where a point represents several; None where no
    value is finite."""
    starts, width = spans_of(column.steps, most)
    finite = np.isfinite(column.values)
    if width == 1:
        x = axes.place(column.steps, column.seconds, 1)
        return {"x": x, "y": rounded(column.values)}
    counts = np.add.reduceat(finite, starts)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        means = np.add.reduceat(np.where(finite, column.values, 0.0), starts) / counts
    lowest = np.minimum.reduceat(np.where(finite, column.values, np.inf), starts)
    highest = np.maximum.reduceat(np.where(finite, column.values, -np.inf), starts)
    x = axes.place(column.steps[starts], column.seconds[starts], width)
    return {"x": x, "y": rounded(means), "lo": rounded(lowest), "hi": rounded(highest)}


def mean_at(column: MetricColumn, steps: Numbers, starts: Numbers) -> Numbers:
    """Means of a column over spans of `steps` that begin at these indices; 0 where it has no finite value."""
    values = np.zeros(len(steps))
    at = np.searchsorted(steps, column.steps)
    inside = (at < len(steps)) & np.isfinite(column.values)
    inside[inside] = steps[at[inside]] == column.steps[inside]
    values[at[inside]] = column.values[inside]
    ends = np.append(starts[1:], len(steps))
    return np.add.reduceat(values, starts) / (ends - starts)


def rounded(values: Numbers | Sequence[float]) -> list[float | None]:
    """Rounds to four digits; None for NaN and infinities, which JSON lacks.

    >>> rounded([0.123456, float("nan"), 12345.6, 2.0])
    [0.1235, None, 12350.0, 2]
    """
    found: list[float | None] = []
    for value in np.asarray(values, dtype=np.float64).tolist():
        if value - value != 0.0:  # true for NaN and infinities only
            found.append(None)
            continue
        short = float(f"{value:.4g}")
        found.append(int(short) if short.is_integer() and abs(short) < 10_000 else short)
    return found
