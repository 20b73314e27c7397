"""Runs the default recipe for some steps and reads its steady state from metrics.jsonl. Shared by the
benchmarks.

In: number of steps and overrides. Out: median seconds per step and per phase, and those from launch to the
end of the first step.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hydraflow.compose.loading import load
from hydraflow.recipes.arithmetic import ArithmeticAssets, cache_folder, is_made
from hydraflow.schema import PPOConfig

WARM_UP = 5
"""Default number of warm-up steps, which are not counted."""


@dataclass(frozen=True)
class Steady:
    """Timings in steady state, in seconds."""

    median: float
    fastest: float
    first_step_after: float
    """From launch to the end of the first step."""
    phases: dict[str, float]
    """Median seconds of each phase."""
    ray_share: float
    """Fraction of a step outside of the time that the workers measured themselves."""


def default_assets(*overrides: str) -> ArithmeticAssets:
    """The default recipe's files, with `overrides`; a one-step run creates them if they are missing."""
    config = load("ppo", PPOConfig, overrides)
    folder = cache_folder(config.recipe, config.trainer.seed)
    if not is_made(folder):
        hydraflow_steps(1, *overrides)
    return ArithmeticAssets(folder / "train.parquet", folder / "val.parquet", folder / "model")


def hydraflow_steps(steps: int, *overrides: str, warm_up: int = WARM_UP) -> Steady:
    """Trains `warm_up` + `steps` steps without validation, in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "hydraflow.main_ppo",
            f"trainer.total_training_steps={steps + warm_up}",
            *overrides,
        ]
        command += [
            f"trainer.default_local_dir={folder}/run",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=1800)
        rows = [
            json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        ]
    rows = [row for row in rows if "timing_s/step" in row]
    counted = rows[warm_up:]
    names = sorted(name for name in counted[0] if name.startswith("timing_s/"))
    return Steady(
        median=statistics.median(row["timing_s/step"] for row in counted),
        fastest=min(row["timing_s/step"] for row in counted),
        first_step_after=rows[0]["perf/seconds_since_launch"],
        phases={name: round(statistics.median(row.get(name, 0.0) for row in counted), 4) for name in names},
        ray_share=statistics.median(row["perf/dispatch_share"] for row in counted),
    )
