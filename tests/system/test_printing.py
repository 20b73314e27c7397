"""A stream that is not UTF-8 gets text that it can hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = """
import sys
from hydraflow.system.printing import make_printable
make_printable()
print("Q\\u00b7n = \\u230a9/2\\u230b \\u2192 \\u00e9 \\ud800", file=sys.{})
"""


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_ascii_stands_in(stream: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(stream)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "Q*n = floor(9/2) -> \\xe9 \\ud800\n")


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "trainer.device=cpu", "--all"],
        ["plan", "data.train_batch_size=6é"],
        ["model_merger", "info", "--local_dir", "é"],
    ],
)
def test_commands_end_without_a_stack_trace(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "é").mkdir()
    torch.save({"w": torch.ones(1)}, tmp_path / "é" / "model_world_size_1_rank_0.pt")
    done = subprocess.run(
        [sys.executable, "-m", f"hydraflow.{command[0]}", *command[1:]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1, 2) and "Traceback" not in done.stderr, done.stderr
    assert (done.stdout + done.stderr).isascii()
