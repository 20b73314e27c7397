"""Mathematical answers, compared by value with math-verify.

In: a response whose last boxed or otherwise marked expression is its answer, and the correct answer. Out:
whether they are equal. math-verify's own time limits are off: they need the alarm signal that the reward
process uses for the whole row.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import math_verify

# it warns that its time limits are off; `rewards/child.py` limits the row instead
logging.getLogger("math_verify").setLevel(logging.ERROR)

_ANSWER = re.compile(r"answer\s*:[\s*]*([^\n]*)", re.IGNORECASE)
_PERCENT = re.compile(r"\\?%")
_BRACE = re.compile(r"\\boxed\{|[{}]")
_DOLLAR = re.compile(r"(?<!\\)\$")
"""Opens mathematics, unlike `\\$`, the sign of a currency."""
_DOLLARS = re.compile(r"\s+dollars?$")
"""Of all units the only one that math-verify does not leave out."""
_BEFORE, _AFTER = re.compile(r"[A-Za-z\s,:]*"), re.compile(r"\s*(dollars?)?\s*([.,;][^\d=]*)?")
"""Words around an expression that are no part of it: a sign, a factor or another number would be."""


def equivalent(solution_str: str, ground_truth: Any) -> dict[str, float]:
    r"""`score` and `acc`: 1 when the response's answer equals the ground truth mathematically.

    Raises `ValueError` for a ground truth that is not an expression: no response could equal it.

    >>> equivalent(r"So it is $\boxed{\frac{1}{2}}$.", "0.5")["score"]
    1.0
    >>> [equivalent(answer, r"50\%")["score"] for answer in (r"\boxed{50}", r"\boxed{5}", r"\boxed{5000\%}")]
    [1.0, 0.0, 0.0]
    >>> equivalent(r"\boxed{50\%}", "50")["score"]
    1.0
    """
    truth = str(ground_truth)
    marked = truth if _DOLLAR.search(truth) or "\\boxed" in truth else f"\\boxed{{{truth}}}"
    gold = _parse(marked)
    if not gold:
        raise ValueError(f"the ground truth {truth!r} cannot be read as mathematics")
    right = float(_equal(gold, marked, last_box(solution_str) or solution_str))
    return {"score": right, "acc": right}


def after_answer(solution_str: str, ground_truth: Any) -> dict[str, float]:
    r"""Compares what follows the last `Answer:` on its line, as DAPO's prompts ask, or without one the last
    boxed expression; other text is no answer. `score`: 1 when it equals the ground truth, else -1, as in
    verl; `acc`: 1 or 0.

    >>> after_answer("First \\boxed{7}, no. Answer: $34$", "34")
    {'score': 1.0, 'acc': 1.0}
    >>> after_answer("Answer:35", "34")
    {'score': -1.0, 'acc': 0.0}
    """
    marked = _ANSWER.findall(solution_str)
    answer = marked[-1].lstrip(" *").rstrip(" *.") if marked else ""
    if not answer:
        answer = last_box(solution_str)
    elif "\\boxed" not in answer:
        answer = f"\\boxed{{{_expression(answer)}}}"
    right = equivalent(answer, ground_truth)["acc"]
    return {"score": 2 * right - 1, "acc": right}


def _expression(line: str) -> str:
    """What is between the only two dollar signs of a line, if there are only words around it; else the line.
    Of several expressions none is chosen, so that a response cannot list them all."""
    parts = _DOLLAR.split(line)
    if len(parts) == 3 and _BEFORE.fullmatch(parts[0]) and _AFTER.fullmatch(parts[2]):
        return parts[1]
    return _DOLLARS.sub("", _DOLLAR.sub("", line))


def last_box(text: str) -> str:
    r"""Of the complete \boxed{...} in a text the one that begins last; empty if there is none. math-verify
    itself would take all of them for a set.

    >>> last_box(r"\boxed{7}. Wait, no: it is \boxed{\frac{1}{2}}, I think. \boxed{3")
    '\\boxed{\\frac{1}{2}}'
    >>> last_box(r"\boxed{x = \boxed{3}}")
    '\\boxed{3}'
    """
    open_braces: list[int] = []
    begin = end = 0
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            open_braces.append(brace.start() if brace[0] != "{" else -1)
        elif open_braces and (start := open_braces.pop()) >= begin:
            begin, end = start, brace.end()
    return text[begin:end]


def _equal(gold: list[Any], text: str, answer: str) -> bool:
    """Either side may omit the percent sign. text: what `gold` was parsed from."""
    if _verified(gold, answer):
        return True
    plain, plain_text = _PERCENT.sub("", answer), _PERCENT.sub("", text)
    if plain != answer:
        return _verified(gold, plain)
    return plain_text != text and _verified(_parse(plain_text), answer)


def _verified(gold: list[Any], answer: str) -> bool:
    return bool(math_verify.verify(gold, _parse(answer), timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    return math_verify.parse(text, parsing_timeout=None)
