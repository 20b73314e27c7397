"""The built-in reward functions: the choice by a row's data source, and the short ones themselves.

In: data source, the response's text, the ground truth. Out: a float, or a dict with `score` and more numbers.
The answer patterns for GSM8K are the usual ones: `#### 42` (strict), else the last number
(flexible). Left out on purpose: bonuses, because `reward.functions` sums several functions; limits in tokens,
which the algorithm knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from hydraflow.errors import ConfigError, Problem
from hydraflow.rewards.config import FUNCTIONS

Score = float | dict[str, Any]

THINK_ANSWER = r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"
"""One block of reasoning, then one answer (DeepSeek-R1, https://arxiv.org/abs/2501.12948)."""
_MARKED = re.compile(r"####\s*(-?\$?[0-9][0-9.,]*)")
_NUMBER = re.compile(r"-?\$?[0-9](?:[0-9,]*[0-9])?(?:\.[0-9]+)?")


def by_source(data_source: str, solution_str: str, ground_truth: Any, **keys: Any) -> Score:
    """Scores one response with the function of its data source. `keys`: the fields of `reward` that these
    functions read. Raises `ConfigError` for an unknown source.

    >>> by_source("arithmetic", "042", "042")
    1.0
    """
    name = find_scorer(data_source)
    read = {key: keys[key] for key in FUNCTIONS[name].reads}
    return _loaded(name)(solution_str, ground_truth, **read)


def find_scorer(data_source: str) -> str:
    """The name of the function for a data source. Raises `ConfigError` listing the known ones."""
    for pattern, name in BUILT_IN.items():
        if fnmatchcase(data_source, pattern):
            return name
    rule = f"has no built-in reward function; there are some for {', '.join(BUILT_IN)}"
    column = "correct the data_source column (data.reward_fn_key)"
    remedy = f"set reward.custom_reward_function.path to a file with your own, or {column}"
    raise ConfigError.one("data_source", data_source, rule, remedy)


@cache
def _loaded(name: str) -> Callable[..., Score]:
    # at first use: sympy alone takes half a second to import, and only mathematics needs it
    return FUNCTIONS[name].load()


def load_scorers(data_sources: Iterable[str]) -> None:
    """Imports the functions of these data sources, so that it does not count against a row's time."""
    for source in set(data_sources):
        with suppress(ConfigError):  # reported when the row is scored
            _loaded(find_scorer(source))


def unknown_sources(data_sources: Iterable[str]) -> list[Problem]:
    """One problem for each data source without a built-in function."""
    problems: list[Problem] = []
    for source in sorted(set(data_sources)):
        try:
            find_scorer(source)
        except ConfigError as error:
            problems += error.problems
    return problems


def exact(solution_str: str, ground_truth: Any) -> float:
    """1 when the response equals the ground truth, ignoring surrounding white space."""
    return float(solution_str.strip() == str(ground_truth).strip())


def gsm8k(solution_str: str, ground_truth: Any) -> dict[str, float]:
    """`score` and `acc`: 1 when the number after the last `####` is right. `acc_flexible`: the same, but
    without any `####` the last number counts.

    >>> gsm8k("6 * 7 = 42\\n#### 42", "42")["score"], gsm8k("It is $42.", "42")
    (1.0, {'score': 0.0, 'acc': 0.0, 'acc_flexible': 1.0})
    """
    marked = _MARKED.findall(solution_str)
    numbers = marked or _NUMBER.findall(solution_str)
    right = bool(numbers) and _plain(numbers[-1]) == _plain(str(ground_truth))
    strict, flexible = float(bool(marked) and right), float(right)
    return {"score": strict, "acc": strict, "acc_flexible": flexible}


def _plain(number: str) -> str:
    """Without thousands separators, currency, a closing full stop and zero decimals: $1,200.00. -> 1200"""
    number = number.strip().replace(",", "").replace("$", "").rstrip(".")
    return re.sub(r"\.0+$", "", number)


def follows_format(solution_str: str, *, pattern: str = THINK_ANSWER) -> float:
    """1 when the whole response matches the regular expression, in which a dot matches line breaks too.

    >>> follows_format("<think>6 * 7</think><answer>42</answer>"), follows_format("42")
    (1.0, 0.0)
    """
    return float(re.fullmatch(pattern, solution_str, re.DOTALL) is not None)


def length(solution_str: str, *, least: int = 0, most: int = 4000, buffer: int = 1000) -> float:
    """0 for `least` to `most` characters; outside, it falls linearly to -1, reached `buffer` characters away.

    >>> [length("x" * n, most=10, buffer=4) for n in (10, 12, 14, 99)]
    [0.0, -0.5, -1.0, -1.0]
    """
    beyond = max(least - len(solution_str), len(solution_str) - most, 0)
    return -min(1.0, beyond / buffer) if beyond else 0.0


BUILT_IN = {
    "arithmetic": "exact",
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo": "math_dapo",
    "aime*": "math_dapo",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "cais/mmlu": "mcq",
    "TIGER-Lab/MMLU-Pro": "mcq",
    "Idavidrein/gpqa": "mcq",
    "allenai/ai2_arc": "mcq",
}
"""Data source (or pattern) -> name of its function."""
