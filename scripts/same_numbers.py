#!/usr/bin/env python
"""Whether a change keeps the numbers: runs an earlier commit and the working tree with the same overrides,
and compares their metrics bit by bit.

    python scripts/same_numbers.py HEAD~1 trainer.total_training_steps=6
    python scripts/same_numbers.py v0.1 trainer.total_training_steps=50 algorithm.adv_estimator=gae

Times and speeds (`timing_s/`, `perf/`, seconds) are not compared. Metrics that only one of the two has are
listed. Exit code 1 if a value differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINKS = {"config": "config", "scripts/slurm": "scripts/slurm", "examples/slurm": "examples/slurm"}
"""Path inside an installed package -> path in the tree; linked, so that both are found."""


def main(commit: str, overrides: Sequence[str]) -> int:
    """Runs both and prints the comparison; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="same-numbers-") as name:
        folder = Path(name)
        before = folder / "before"
        git("worktree", "add", "--detach", "--force", str(before), commit)
        try:
            for inside, target in LINKS.items():
                link = before / "hydraflow" / inside
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(before / target)
            runs = [run(tree, folder, overrides) for tree in (before, ROOT)]
        finally:
            git("worktree", "remove", "--force", str(before))
    return compare(*runs)


def git(*words: str) -> None:
    subprocess.run(["git", "-C", str(ROOT), *words], check=True, stdout=subprocess.DEVNULL)


def run(tree: Path, folder: Path, overrides: Sequence[str]) -> list[dict[str, float]]:
    """Metrics of a run with that tree's code. Both runs share the recipe's cached model."""
    out = folder / f"run-of-{tree.name}"
    print(f"running {tree}", flush=True)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "hydraflow.main_ppo",
            f"trainer.default_local_dir={out}",
            f"recipe.cache_dir={folder / 'cache'}",
            "trainer.logger=[file]",
            *overrides,
        ],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(tree)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def compare(before: list[dict[str, float]], now: list[dict[str, float]]) -> int:
    """Prints the differences; returns 1 if a value differs.

    >>> compare([{"step": 1, "loss": 0.5}], [{"step": 1, "loss": 0.5, "more": 1.0}])
    1 steps, 2 values are the same, 0 differ; only now: more
    0
    """
    if len(before) != len(now):
        print(f"{len(before)} steps before, {len(now)} now")
        return 1
    same, different, only = 0, 0, [set[str](), set[str]()]
    for old, new in zip(before, now, strict=True):
        names = [{name for name in row if is_compared(name)} for row in (old, new)]
        only[0] |= names[0] - names[1]
        only[1] |= names[1] - names[0]
        for name in sorted(names[0] & names[1]):
            same += old[name] == new[name]
            different += old[name] != new[name]
            if old[name] != new[name]:
                print(f"step {new['step']:g}: {name} was {old[name]!r}, is {new[name]!r}")
    listed = [
        f"only {when}: {', '.join(sorted(names))}" for when, names in zip(("before", "now"), only) if names
    ]
    print("; ".join([f"{len(now)} steps, {same} values are the same, {different} differ", *listed]))
    return int(different > 0)


def is_compared(name: str) -> bool:
    """Whether a metric is the same in two runs of the same code."""
    return not name.startswith(("timing_s/", "perf/")) and "seconds" not in name and name != "time"


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        sys.exit(2)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
