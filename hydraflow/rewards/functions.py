"""The built-in reward functions, chosen by a row's data source.

In: data source, the response's text, the ground truth. Out: a float, or a dict with `score` and more numbers.
The answer patterns for GSM8K are those that its users compare by: `#### 42` (strict), else the last number
(flexible). Left out on purpose: format bonuses and partial credit; a custom function gives those.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

from hydraflow.errors import ConfigError, Problem

Score = float | dict[str, Any]
Scorer = Callable[[str, Any], Score]
"""(solution_str, ground_truth) -> score"""

_MARKED = re.compile(r"####\s*(-?\$?[0-9][0-9.,]*)")
_NUMBER = re.compile(r"-?\$?[0-9](?:[0-9,]*[0-9])?(?:\.[0-9]+)?")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> Score:
    """Scores one response with the function of its data source. Raises `ConfigError` for an unknown one.

    >>> compute_score("arithmetic", "042", "042")
    1.0
    """
    return find_scorer(data_source)(solution_str, ground_truth)


def find_scorer(data_source: str) -> Scorer:
    """The function for a data source. Raises `ConfigError` listing the known ones."""
    for pattern, load in BUILT_IN.items():
        if fnmatchcase(data_source, pattern):
            return load()
    rule = f"no built-in reward function is for it; known are {', '.join(BUILT_IN)}"
    column = "correct the data_source column (data.reward_fn_key)"
    remedy = f"set reward.custom_reward_function.path to a file with your own, or {column}"
    raise ConfigError.one("data_source", data_source, rule, remedy)


def unknown_sources(data_sources: Iterable[str]) -> list[Problem]:
    """One problem for each data source without a built-in function; those of the others are imported."""
    problems: list[Problem] = []
    for source in sorted(set(data_sources)):
        try:
            find_scorer(source)
        except ConfigError as error:
            problems += error.problems
    return problems


def exact(solution_str: str, ground_truth: Any) -> float:
    """1 when the response is the ground truth, white space around it aside."""
    return float(solution_str.strip() == str(ground_truth).strip())


def gsm8k(solution_str: str, ground_truth: Any) -> dict[str, float]:
    """`score` and `acc`: the number after the last `####` is right; `acc_flexible`: so is that number or,
    without one, the last number.

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


def _load_mathematics() -> Scorer:
    # sympy takes half a second to import; runs without mathematics need not pay for it.
    from hydraflow.rewards.mathematics import equivalent

    return equivalent


def _load_after_answer() -> Scorer:
    from hydraflow.rewards.mathematics import after_answer

    return after_answer


BUILT_IN: dict[str, Callable[[], Scorer]] = {
    "arithmetic": lambda: exact,
    "openai/gsm8k": lambda: gsm8k,
    "lighteval/MATH": _load_mathematics,
    "DigitalLearningGmbH/MATH-lighteval": _load_mathematics,
    "HuggingFaceH4/MATH-500": _load_mathematics,
    "math_dapo": _load_after_answer,
    "aime*": _load_after_answer,
}
"""Data source (or pattern) -> loader of its function."""
