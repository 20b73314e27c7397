"""Measures by how much a run's processes grow in 200 training steps of the default recipe, early and late.

    python scripts/bench/growth.py [--steps 200] [overrides ...]

Prints one JSON object for each step of `STARTS`: for the controller, the workers and Ray's control service
(gcs_server), MiB of resident memory after that step and after `--steps` more, and the relative growth. The
early figure includes allocator caches that fill; the late one should be zero.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from steady import default_assets

STARTS, BEYOND = (60, 400), 20
"""Steps from which growth is measured; and steps after the last measurement, so that the run is still alive
then."""
LIMIT_SECONDS = 800


def resident(pid: int) -> dict[str, float]:
    """Resident MiB by kind of process."""
    found = {"controller": psutil.Process(pid).memory_info().rss / 2**20}
    for process in psutil.Process(pid).children(recursive=True):
        name = " ".join(process.cmdline())
        kind = (
            "workers" if name.startswith("ray::WorkerHost") else "gcs_server" if "gcs_server" in name else ""
        )
        if kind:
            found[kind] = found.get(kind, 0.0) + process.memory_info().rss / 2**20
    return found


def await_step(metrics: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    """Waits until the run has logged the step."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not metrics.exists() or f'"step": {step},' not in metrics.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run did not reach step {step}")
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    args, overrides = parser.parse_known_args()
    default_assets(*overrides)
    marks = sorted({start + more for start in STARTS for more in (0, args.steps)})
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hydraflow.main_ppo", *overrides]
        command += [f"trainer.total_training_steps={marks[-1] + BEYOND}", "trainer.test_freq=-1"]
        command += [f"trainer.default_local_dir={folder}/run", "trainer.val_before_train=false"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        metrics = Path(folder) / "run" / "metrics.jsonl"
        found = {}
        for mark in marks:
            await_step(metrics, mark, process)
            found[mark] = resident(process.pid)
        process.wait(timeout=LIMIT_SECONDS)
    for start in STARTS:
        before, after = found[start], found[start + args.steps]
        growth = {kind: after[kind] / before[kind] - 1 for kind in before}
        facts = {"start": start, "steps": args.steps, "before_mib": before, "after_mib": after}
        print(json.dumps(facts | {"growth": growth}))


if __name__ == "__main__":
    main()
