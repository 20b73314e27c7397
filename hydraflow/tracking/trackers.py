"""The trackers by name, and all of a run's trackers as one.

In: `trainer.logger` and facts of the run. Out: one Tracker that passes each call on to all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from hydraflow.errors import HydraflowError
from hydraflow.tracking.base import Forwarder, RunInfo, Tracker, TrackerFactory
from hydraflow.tracking.console import open_console
from hydraflow.tracking.file import FileTracker
from hydraflow.tracking.guarded import BackgroundTracker, ForegroundTracker
from hydraflow.tracking.history import read_metrics, seconds_of
from hydraflow.tracking.mlflow import MlflowTracker
from hydraflow.tracking.swanlab import SwanlabTracker
from hydraflow.tracking.symptoms import SymptomWatch
from hydraflow.tracking.tensorboard import TensorboardTracker
from hydraflow.tracking.wandb import WandbTracker

logger = logging.getLogger(__name__)

TRACKERS: dict[str, TrackerFactory] = {
    "file": FileTracker,
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "swanlab": SwanlabTracker,
    "console": open_console,
}
"""Name in trainer.logger -> its constructor. They are called in this order: the file first, because it must
not miss a step."""
LOCAL = ("file", "tensorboard", "console")
"""Trackers without a server: they also show what precedes a run, such as a recipe's warm start."""


class Trackers(Forwarder):
    """Several trackers as one. A context manager: leaving it closes them all, also on an error or Ctrl-C."""

    def __init__(self, trackers: Sequence[Tracker], symptoms: SymptomWatch):
        self._trackers = list(trackers)
        self._symptoms = symptoms

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Passes the metrics of one step to every tracker; warns once of each symptom."""
        super().log(metrics, step)
        for sentence in self._symptoms.after(step, metrics):
            logger.warning("%s", sentence)

    def _pass(self, call: Callable[[Tracker], None]) -> None:
        for tracker in self._trackers:
            call(tracker)

    def close(self, *, failed: bool = False) -> None:
        """Closes every tracker, the last one first, even if some of them raise; a second call does nothing.
        `failed`: the run ended with an error."""
        for tracker in self._trackers:
            if isinstance(tracker, BackgroundTracker):
                tracker.begin_closing(failed=failed)  # all at once: two that hang cost one wait
        with ExitStack() as closing:  # also when a Ctrl-C ends the wait for one of them
            while self._trackers:
                closing.callback(_close, self._trackers.pop(0), failed=failed)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(failed=error is not None)


def open_trackers(names: Sequence[str], run: RunInfo) -> Trackers:
    """Opens the trackers of `trainer.logger`; the file is always among them. Creates the run folder if
    missing, and takes the seconds before this start from it.

    `compose/rules.py` has checked the names. Only the file can fail the run; the others log a warning.
    """
    assert set(names) <= set(TRACKERS), names
    run.folder.mkdir(parents=True, exist_ok=True)
    earlier = read_metrics(run.folder)
    run = replace(run, seconds_before=seconds_of(earlier))
    watch = SymptomWatch()  # a resumed run must not repeat symptoms of its earlier steps
    for record in earlier:
        if record["step"] <= run.done_steps:
            watch.after(int(record["step"]), record)
    return Trackers([_open(name, run) for name in TRACKERS if name in ("file", *names)], watch)


def _close(tracker: Tracker, *, failed: bool) -> None:
    try:
        tracker.close(failed=failed)
    except (OSError, ValueError, RuntimeError, HydraflowError) as error:
        text = "a tracker could not be closed (%s: %s); its last entries may be missing"
        logger.warning(text, type(tracker).__name__, error)


def _open(name: str, run: RunInfo) -> Tracker:
    """The file must not miss a step, and the console draws in the calling thread; all others run in the
    background."""
    factory = TRACKERS[name]
    if name not in ("file", "console"):
        return BackgroundTracker(name, factory, run)
    return ForegroundTracker(name, factory(run)) if name == "console" else factory(run)
