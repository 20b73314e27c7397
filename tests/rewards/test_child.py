"""What a reward function returned, read as a score; and what loading the pool's child costs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from hydraflow.rewards.values import read_value


@pytest.mark.parametrize(
    ("value", "result"),
    [
        (1, (1.0, {}, None)),
        (True, (1.0, {}, None)),
        (np.float32(0.5), (0.5, {}, None)),
        ({"score": 0.5, "acc": True, "pred": "42", "bad": float("nan")}, (0.5, {"acc": 1.0}, None)),
        ({"acc": 1}, (None, {}, "returned a dict without 'score' (it has acc)")),
        ({"score": "1"}, (None, {}, "returned a str, not a number")),
        (None, (None, {}, "returned a NoneType, not a number")),
        ("1.0", (None, {}, "returned a str, not a number")),
        (np.array([1.0, 2.0]), (None, {}, "returned a ndarray, not a number")),
        (float("nan"), (None, {}, "returned nan, not a finite number")),
        (float("-inf"), (None, {}, "returned -inf, not a finite number")),
        (10**400, (None, {}, "returned an integer that is too large for a float")),
        ({"score": 1, "acc": "yes"}, (None, {}, "returned acc='yes', not a number")),
    ],
)
def test_read_value(value: Any, result: Any) -> None:
    assert read_value(value) == result


def test_a_child_imports_nothing_heavy() -> None:
    code = (
        "import hydraflow.rewards.child, sys; print(*({'torch', 'ray', 'numpy', 'sympy', 'transformers'} &"
        " set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == ""
