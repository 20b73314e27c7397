"""Interprets what a reward function returned as a score.

In: any value. Out: a score and the other numbers, or why the value is not a score.
"""

from __future__ import annotations

import math
from typing import Any

LARGEST = 3.4028234663852886e38
"""Of float32, which columns of scores have."""

Result = tuple[float | None, dict[str, float], str | None]
"""(score, other numbers, error); no score if it failed."""


def read_value(value: Any) -> Result:
    """A score from a number or a dict with 'score'; of the dict's other fields, the numbers are kept.

    >>> read_value({"score": 1, "acc": True, "pred": "42"})
    (1.0, {'acc': 1.0}, None)
    """
    fields = value if isinstance(value, dict) else {"score": value}
    if "score" not in fields:
        there = ", ".join(map(str, fields)) or "nothing"
        return None, {}, f"returned a dict without 'score' (it has {there})"
    score = _number(fields["score"])
    if score is None and type(fields["score"]) is int:
        return None, {}, "returned an integer that is too large for a float"
    if score is None:
        return None, {}, f"returned a {type(fields['score']).__name__}, not a number"
    if not math.isfinite(score):
        return None, {}, f"returned {score}, not a finite number"
    if abs(score) > LARGEST:
        return None, {}, f"returned {score:g}, which is beyond the range of float32"
    numbers = {str(name): _number(field) for name, field in fields.items() if name != "score"}
    if "acc" in numbers and numbers["acc"] is None:
        return None, {}, f"returned acc={fields['acc']!r:.100}, not a number"
    extra = {
        name: number for name, number in numbers.items() if number is not None and abs(number) <= LARGEST
    }
    return score, extra, None


def _number(value: Any) -> float | None:
    """`value` as a float: Python and numpy numbers, tensors without dimensions. Text is not a number."""
    if not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # arrays and tensors with dimensions
        return None
