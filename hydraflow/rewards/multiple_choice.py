"""Multiple choice: extracts the letter from a response and compares it with the right one.

In: a response, and a letter or the number of the choice from 0. Out: whether it is right. Left out on
purpose: comparing the text of choices; a ground truth that is not a letter fails its row.
"""

from __future__ import annotations

import re
from typing import Any

_PATTERNS = (
    re.compile(r"\\boxed\{\s*(?:\\text\{|\\mathrm\{|\\textbf\{)?\s*\(?([A-Za-z])\)?\s*[.:})]"),
    re.compile(r"<answer>\s*\(?([A-Za-z])\)?[.:]?\s*</answer>", re.IGNORECASE),
    re.compile(
        r"\b(?i:answer(?:\s+is|\s*:)[\s*:]*(?:(?:option|choice)\s+)?)"
        r"(?:\(([A-Za-z])\)|([A-Z])(?![\w'])|([a-z])[.\s*]*$)",
        re.MULTILINE,
    ),
)
"""Tried in order: the last match of the first pattern that matches counts."""
_ALONE = re.compile(r"\A[\s*(]*([A-Za-z])[\s*).:]*\Z")
"""A response, or its last line, that is nothing but a letter."""


def mcq(solution_str: str, ground_truth: Any) -> dict[str, float]:
    r"""`score` and `acc`: 1 when the last \boxed{B}, else <answer>B</answer>, else "answer is B" or
    "Answer: B", else a last line that is only B, has the right letter.

    Raises `ValueError` for a ground truth that is neither a letter nor the number of a choice.

    >>> mcq("A looks right, but the answer is (C).", "C"), mcq("B", 2)
    ({'score': 1.0, 'acc': 1.0}, {'score': 0.0, 'acc': 0.0})
    """
    right = float(_letter_of(solution_str) == _truth(ground_truth))
    return {"score": right, "acc": right}


def _letter_of(text: str) -> str | None:
    for pattern in _PATTERNS:
        if found := pattern.findall(text):
            last = found[-1]
            return (last if isinstance(last, str) else "".join(last)).upper()
    lines = text.strip().splitlines()
    alone = _ALONE.match(lines[-1]) if lines else None
    return alone[1].upper() if alone else None


def _truth(ground_truth: Any) -> str:
    text = str(ground_truth).strip()
    if text.isdigit() and int(text) < 26:
        return chr(ord("A") + int(text))
    if alone := _ALONE.match(text):
        return alone[1].upper()
    raise ValueError(f"the ground truth {text!r} is neither a letter nor the number of a choice from 0")
