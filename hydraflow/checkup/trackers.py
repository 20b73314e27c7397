"""Where metrics go: the run folder can be written, and each tracker of trainer.logger can be used.

In: `trainer.logger`. Out: findings, one per tracker. A new tracker is a line in `TRACKER_CHECKS`.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from hydraflow.checkup.facts import Facts
from hydraflow.checkup.finding import Finding, of_problem, ok, problem
from hydraflow.errors import ConfigError
from hydraflow.tracking.base import RunInfo
from hydraflow.tracking.run_folder import RunFolder
from hydraflow.tracking.trackers import TRACKERS
from hydraflow.trainer.config import TrainerConfig

ON_SCREEN = ("console",)
"""Trackers that write no file."""


def check_trackers(facts: Facts) -> Iterator[Finding]:
    """Asks each tracker that the run uses; the file is always among them."""
    trainer = facts.config.trainer
    for name in dict.fromkeys(["file", *trainer.logger]):
        yield TRACKER_CHECKS[name](trainer)


def check_writing(facts: Facts) -> Iterator[Finding]:
    """Has each tracker that writes files take one number, in a folder that goes away."""
    for name in dict.fromkeys(["file", *facts.config.trainer.logger]):
        if name in ON_SCREEN:
            continue
        with tempfile.TemporaryDirectory() as folder:
            tracker = TRACKERS[name](RunInfo(Path(folder), "doctor", total_steps=1))
            tracker.log({"doctor": 1.0}, step=1)
            tracker.close()
            size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        yield ok(f"{name} took a number and wrote {size} bytes") if size else problem(f"{name} took a number and wrote nothing")


def _check_file(trainer: TrainerConfig) -> Finding:
    try:
        RunFolder.prove_writable(trainer.default_local_dir)
    except ConfigError as error:
        return of_problem(error.problems[0])
    return ok(f"metrics.jsonl goes to {Path(trainer.default_local_dir or 'runs').expanduser()}, which can be written")


def _check_tensorboard(trainer: TrainerConfig) -> Finding:
    if importlib.util.find_spec("tensorboard") is None:
        kept = ",".join(name for name in trainer.logger if name != "tensorboard")
        return problem("trainer.logger has tensorboard, which is not installed", f"pip install tensorboard, or trainer.logger=[{kept}]")
    return ok("tensorboard is installed")


def _check_console(trainer: TrainerConfig) -> Finding:
    return ok("the console needs nothing")


TRACKER_CHECKS: dict[str, Callable[[TrainerConfig], Finding]] = {
    "file": _check_file,
    "tensorboard": _check_tensorboard,
    "console": _check_console,
}
"""Name in trainer.logger -> what it needs. One that needs a login says here what it falls back to without."""
