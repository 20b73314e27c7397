"""Measures by how much a run's processes grow in 200 training steps of the default recipe, early and late.

    python scripts/bench/growth.py [--steps 200] [overrides ...]

Prints one JSON object for each step of `STARTS`: for the controller, the workers and Ray's control service
(gcs_server), MiB of resident memory after that step and after `--steps` more, and the relative growth. The
early figure includes allocator caches that fill. The late one should be zero: the bench fails if any kind of
process grows by more than `MOST_GROWTH`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from steady import default_assets

STARTS, BEYOND = (60, 400), 20
"""Steps from which growth is measured; and steps after the last measurement, so that the run is still alive
then."""
LIMIT_SECONDS = 800
"""Time limit of everything; below that of `all.py`, so that there is time to end the run."""
MOST_GROWTH = 0.01
"""Relative, over the steps measured late."""

Sizes = dict[str, float]
"""Resident MiB by kind of process."""


def resident(pid: int) -> Sizes:
    found = {"controller": psutil.Process(pid).memory_info().rss / 2**20}
    for process in psutil.Process(pid).children(recursive=True):
        name = " ".join(process.cmdline())
        kind = (
            "workers" if name.startswith("ray::WorkerHost") else "gcs_server" if "gcs_server" in name else ""
        )
        if kind:
            found[kind] = found.get(kind, 0.0) + process.memory_info().rss / 2**20
    return found


def await_step(metrics: Path, step: int, process: subprocess.Popen[bytes], deadline: float) -> None:
    """Waits until the run has logged the step."""
    while not metrics.exists() or f'"step": {step},' not in metrics.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run did not reach step {step}")
        time.sleep(0.2)


def sizes_at(
    marks: Sequence[int], command: Sequence[str], metrics: Path, deadline: float
) -> dict[int, Sizes]:
    """Runs a command that logs these steps; what its processes occupy after each. Ends it afterwards."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    found = {}
    try:
        for mark in marks:
            await_step(metrics, mark, process, deadline)
            found[mark] = resident(process.pid)
    finally:
        process.terminate()
        process.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    args, overrides = parser.parse_known_args()
    deadline = time.monotonic() + LIMIT_SECONDS
    default_assets(*overrides)
    marks = sorted({start + more for start in STARTS for more in (0, args.steps)})
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hydraflow.main_ppo", *overrides]
        command += [f"trainer.total_training_steps={marks[-1] + BEYOND}", "trainer.test_freq=-1"]
        command += [f"trainer.default_local_dir={folder}/run", "trainer.val_before_train=false"]
        found = sizes_at(marks, command, Path(folder) / "run" / "metrics.jsonl", deadline)
    growth: dict[int, dict[str, float]] = {}
    for start in STARTS:
        before, after = found[start], found[start + args.steps]
        growth[start] = {kind: after[kind] / before[kind] - 1 for kind in before}
        facts = {"start": start, "steps": args.steps, "before_mib": before, "after_mib": after}
        print(json.dumps(facts | {"growth": growth[start]}))
    late = STARTS[-1]
    if over := [f"{kind} {more:+.1%}" for kind, more in growth[late].items() if more > MOST_GROWTH]:
        raise SystemExit(f"still growing after step {late}, over {MOST_GROWTH:.0%}: {', '.join(over)}")


if __name__ == "__main__":
    main()
