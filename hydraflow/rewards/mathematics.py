"""Mathematical answers, compared by value with math-verify.

In: a response whose last boxed or otherwise marked expression is the answer, and the right answer. Out: 1 or
0. Its own time limits are off: they need the alarm clock that the reward process uses for the whole row.
"""

from __future__ import annotations

import logging
from typing import Any

import math_verify

# It warns that its time limits are off; `rewards/pool.py` keeps the limit.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def equivalent(solution_str: str, ground_truth: Any) -> dict[str, float]:
    r"""`score` and `acc`: 1 when the response's answer equals the ground truth mathematically.

    Raises `ValueError` for a ground truth that is no expression: no response could equal it.

    >>> equivalent(r"So it is $\boxed{\frac{1}{2}}$.", "0.5")["score"]
    1.0
    """
    truth = str(ground_truth)
    gold = _parse(truth if "$" in truth or "\\boxed" in truth else f"\\boxed{{{truth}}}")
    if not gold:
        raise ValueError(f"the ground truth {truth!r} cannot be read as mathematics")
    right = float(math_verify.verify(gold, _parse(last_boxed(solution_str)), timeout_seconds=None))
    return {"score": right, "acc": right}


def last_boxed(text: str) -> str:
    r"""The last complete \boxed{...} of a text, else the whole text. math-verify itself would take all of
    them for a set.

    >>> last_boxed(r"\boxed{7}. Wait, no: it is \boxed{\frac{1}{2}}, I think.")
    '\\boxed{\\frac{1}{2}}'
    """
    start = text.rfind("\\boxed{")
    depth = 0
    for end in range(start, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if text[end] == "}" and depth == 0:
            return text[start : end + 1]
    return text


def _parse(text: str) -> list[Any]:
    return math_verify.parse(text, parsing_timeout=None)
