"""Rewards for format and length, to be combined with others by `reward.functions`.

In: a response's text. Out: a number. Left out on purpose: limits in tokens, which the algorithm knows.
"""

from __future__ import annotations

import re

THINK_ANSWER = r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"
"""One block of reasoning, then one answer (DeepSeek-R1, https://arxiv.org/abs/2501.12948)."""


def follows_format(solution_str: str, *, pattern: str = THINK_ANSWER) -> float:
    """1 when the whole response matches the regular expression, in which a dot matches line breaks too.

    >>> follows_format("<think>6 * 7</think><answer>42</answer>"), follows_format("42")
    (1.0, 0.0)
    """
    return float(re.fullmatch(pattern, solution_str, re.DOTALL) is not None)


def length(solution_str: str, *, least: int = 0, most: int = 4000, buffer: int = 1000) -> float:
    """0 for `least` to `most` characters; beyond, it falls evenly to -1, which it reaches after `buffer`.

    >>> [length("x" * n, most=10, buffer=4) for n in (10, 12, 14, 99)]
    [0.0, -0.5, -1.0, -1.0]
    """
    beyond = max(least - len(solution_str), len(solution_str) - most, 0)
    return -min(1.0, beyond / buffer) if beyond else 0.0
