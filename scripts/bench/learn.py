#!/usr/bin/env python
"""Checks that choices learn: trains the arithmetic recipe with each, and prints held-out accuracy before and
after.

    python scripts/bench/learn.py algorithm.adv_estimator=grpo,opo,remax
    python scripts/bench/learn.py --steps 30 actor_rollout_ref.actor.policy_loss.loss_mode=vanilla,gspo

A key with several comma-separated values is tried with each; several such keys, with all combinations. Other
overrides apply to every run. Runs are sequential, one process each without Ray, from the same warm-started
model. Prints a line after each run. Exit code 1 if a run failed or did not raise the accuracy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

LIMIT_SECONDS = 3600
"""Time limit of one run, including the warm start."""
ONE_PROCESS = (
    "trainer.debug.local=true",
    "trainer.n_gpus_per_node=1",
    "trainer.threads_per_process=1",
    "trainer.test_freq=-1",
    "trainer.logger=[file]",
    "trainer.save_final_model=false",
)


def variants(overrides: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The overrides of each run. Commas in values with brackets or quotes do not separate.

    >>> list(variants(["a=1,2", "b=3", "c=[4,5]"]))
    [('a=1', 'b=3', 'c=[4,5]'), ('a=2', 'b=3', 'c=[4,5]')]
    """
    listed = []
    for override in overrides:
        key, _, values = override.partition("=")
        several = [values] if values[:1] in "[{'\"" else values.split(",")
        listed.append([f"{key}={value}" for value in several])
    return product(*listed)


def learn(steps: int, overrides: Sequence[str]) -> dict[str, float]:
    """Trains, and returns the content of `summary.json`. RuntimeError with the end of stderr if the run
    fails."""
    with tempfile.TemporaryDirectory(prefix="learn-") as folder:
        command = [sys.executable, "-m", "hydraflow.main_ppo", f"trainer.total_training_steps={steps}"]
        command += [*ONE_PROCESS, f"trainer.default_local_dir={folder}", *overrides]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()[-500:]}")
        summary: dict[str, float] = json.loads((Path(folder) / "summary.json").read_text())
        return summary


def main() -> int:
    """Runs all variants and prints a line per run; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50)
    args, overrides = parser.parse_known_args()
    tried = list(variants(overrides))
    same = {override for override in overrides if all(override in variant for variant in tried)}
    print(f"{'before':>7} {'after':>7} {'seconds':>8}  choice", flush=True)
    worst = 0
    for variant in tried:
        name = " ".join(override for override in variant if override not in same) or "as given"
        try:
            summary = learn(args.steps, variant)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{'-':>7} {'-':>7} {'-':>8}  {name}: {error}", flush=True)
            worst = 1
            continue
        first, last = summary["first_val_accuracy"], summary["last_val_accuracy"]
        print(f"{first:7.1%} {last:7.1%} {summary['seconds']:8.0f}  {name}", flush=True)
        worst = max(worst, int(last <= first))
    return worst


if __name__ == "__main__":
    sys.exit(main())
