"""Scores programs by tests: they run in a sandbox, and their output is compared outside of it.

In: a response with a Python program, and tests as APPS and verl's data have them: `{"inputs": [...],
"outputs": [...]}`, optionally with the name of a function, as JSON text or a mapping. Out: the share of tests
passed. The expected outputs never enter the sandbox. Left out on purpose: tests that are code themselves
(`assert f(1) == 2`), which would run in the program's process, where it could change them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from hydraflow.rewards.config import SandboxConfig
from hydraflow.rewards.sandbox import START_SECONDS, run
from hydraflow.rewards.sandbox_program import DONE

_FENCED = re.compile(r"```[^\n`]+```|```(?P<language>[^\n`]*)\n(?P<text>.*?)(?:```|\Z)", re.DOTALL)
"""Code in a line, which is skipped, or a block."""
_PYTHON = re.compile(r"(?:python|py)3?(?![\w-])", re.IGNORECASE)
FUNCTION = "fn_name"
_CLOSE = 1e-6
"""Relative and absolute tolerance for a number with a decimal point."""


@dataclass(frozen=True)
class Tests:
    """Inputs of a program, and the expected outputs."""

    inputs: list[Any]
    outputs: list[Any]
    function: str | None
    """Name of the function that takes the inputs; None: the program reads them from standard input."""


def passed_tests(
    solution_str: str, ground_truth: Any, *, sandbox: SandboxConfig, timeout: float, partial: bool = True
) -> dict[str, float]:
    """`score`: the share of tests that the response's `program` passes, 0 or 1 without `partial`; `acc`: 1 if
    it passes all. Tests after one that exceeds a limit count as failed, as do tests that do not finish within
    the row's time, `timeout` seconds.

    Raises ValueError for a ground truth without tests, SandboxError if nothing can be run.
    """
    tests = read_tests(ground_truth)
    outcomes = run(
        program(solution_str),
        tests.inputs,
        sandbox=sandbox,
        seconds=timeout - START_SECONDS,
        function=tests.function,
    )
    same = _same_value if tests.function else _same_text
    pairs = zip(outcomes, tests.outputs, strict=False)
    share = sum(one.how == DONE and same(one.output, wanted) for one, wanted in pairs) / len(tests.outputs)
    passed = float(share == 1.0)
    return {"score": share if partial else passed, "acc": passed}


def program(response: str) -> str:
    """The last fenced block of Python; without one the last that names no language; without one the last
    block; without any the whole response.

    >>> program("```python\\nprint(6)\\n```\\nIt prints\\n```text\\n6\\n```\\nas wanted.")
    'print(6)\\n'
    """
    found = [one for one in _FENCED.finditer(response) if one["text"] is not None]
    blocks = [(one["language"].strip(), one["text"]) for one in found]
    python = [text for language, text in blocks if _PYTHON.match(language)]
    unnamed = [text for language, text in blocks if not language]
    return (python or unnamed or [text for _, text in blocks] or [response])[-1]


def read_tests(ground_truth: Any) -> Tests:
    """The tests of a ground truth. ValueError when it has none, or not one output for each input.

    >>> read_tests('{"inputs": ["1 2\\\\n"], "outputs": ["3\\\\n"]}')
    Tests(inputs=['1 2\\n'], outputs=['3\\n'], function=None)
    """
    given = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(given, Mapping) or not {"inputs", "outputs"} <= given.keys():
        raise ValueError("the ground truth of a program must be {inputs: [...], outputs: [...]}")
    inputs, outputs = list(given["inputs"]), list(given["outputs"])
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"the ground truth has {len(inputs)} inputs and {len(outputs)} outputs")
    if given.get(FUNCTION) is None:
        return Tests([_text(one) for one in inputs], [_text(one) for one in outputs], None)
    return Tests([_arguments(one) for one in inputs], outputs, str(given[FUNCTION]))


def _text(given: Any) -> str:
    """Text, or a list of its lines."""
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def _arguments(given: Any) -> list[Any]:
    """A list of arguments, or text with one JSON value a line."""
    if isinstance(given, str):
        return [json.loads(line) for line in given.splitlines() if line.strip()]
    return list(given)


def _same_value(got: str, wanted: Any) -> bool:
    """Whether a function returned `wanted`: the value itself, its JSON text, or the value in a list, as APPS
    has it.

    >>> _same_value("[1, 0.30000000000000004]", "[1, 0.3]"), _same_value('"21"', ["21"]), _same_value("1", 2)
    (True, True, False)
    """
    try:
        value = json.loads(got)
    except (ValueError, RecursionError):  # the program may write anything
        return False
    wanted_ones = [wanted]
    if isinstance(wanted, str):
        with suppress(ValueError):
            wanted_ones.append(json.loads(wanted))
    wanted_ones += [one[0] for one in wanted_ones if isinstance(one, list) and len(one) == 1]
    return any(_equal(value, one) for one in wanted_ones)


def _equal(got: Any, wanted: Any) -> bool:
    """Equality of JSON values in which floats may differ by rounding."""
    if isinstance(wanted, float) and isinstance(got, float):
        return math.isclose(got, wanted, rel_tol=_CLOSE, abs_tol=_CLOSE)
    if isinstance(wanted, list) and isinstance(got, list):
        return len(got) == len(wanted) and all(map(_equal, got, wanted))
    if isinstance(wanted, Mapping) and isinstance(got, dict):
        return got.keys() == wanted.keys() and all(_equal(got[name], wanted[name]) for name in got)
    return got == wanted


def _same_text(got: str, wanted: str) -> bool:
    """Compares line by line and word by word, ignoring other white space and empty lines.

    >>> _same_text("1 2 \\n0.3333333\\n", "1 2\\n0.33333333"), _same_text("1\\n2", "1 2")
    (True, False)
    """
    ours, theirs = ([line.split() for line in text.splitlines() if line.strip()] for text in (got, wanted))
    if list(map(len, ours)) != list(map(len, theirs)):
        return False
    return all(map(_same_word, chain(*ours), chain(*theirs)))


def _same_word(got: str, wanted: str) -> bool:
    if got == wanted:
        return True
    if "." not in wanted:  # integers must match exactly
        return False
    try:
        return math.isclose(float(got), float(wanted), rel_tol=_CLOSE, abs_tol=_CLOSE)
    except ValueError:
        return False
