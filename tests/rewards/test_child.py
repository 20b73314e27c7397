"""What a reward function returned, read as a score; and what loading the pool's child costs."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from hydraflow.rewards.child import PROGRESS_BYTES, RowProgress
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
        (1e39, (None, {}, "returned 1e+39, which is beyond the range of float32")),
        ({"score": -3e38, "far": -1e39}, (-3e38, {}, None)),
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


def test_progress_that_is_read_while_it_is_written_never_shows_other_numbers() -> None:
    """A row that seems to have started at 0 would have exceeded its limit long ago."""
    shared = os.memfd_create("progress")
    os.truncate(shared, PROGRESS_BYTES)
    progress = RowProgress(shared)
    progress.note(7, 100.0, 2.0, 30.0)
    code = (
        "import sys; from hydraflow.rewards.child import RowProgress\n"
        "progress = RowProgress(int(sys.argv[1]))\n"
        "while True: progress.note(8, 200.0, 3.0, 30.0); progress.note(7, 100.0, 2.0, 30.0)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(shared)], pass_fds=[shared])
    try:
        while progress.read()[0] == 7:
            assert writer.poll() is None
        seen = {progress.read() for _ in range(100_000)}
    finally:
        writer.kill()
        writer.wait()
        progress.close()
        os.close(shared)
    assert {row for row, *_ in seen} == {7, 8}
    assert {(began, waited, limit) for _, began, waited, limit in seen} <= {
        (100.0, 2.0, 30.0),
        (200.0, 3.0, 30.0),
        (200.0, 2.0, 30.0),
        (100.0, 3.0, 30.0),
    }
