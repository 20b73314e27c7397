"""The trackers by name, and all of a run's trackers as one.

In: `trainer.logger` and what the run is. Out: one Tracker that passes each call on to all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from hydraflow.tracking.base import RunInfo, Tracker, TrackerFactory
from hydraflow.tracking.console import open_console
from hydraflow.tracking.file import FileTracker
from hydraflow.tracking.history import seconds_of
from hydraflow.tracking.tensorboard import TensorboardTracker

TRACKERS: dict[str, TrackerFactory] = {
    "file": FileTracker,
    "tensorboard": TensorboardTracker,
    "console": open_console,
}
"""Name in trainer.logger -> what opens it. The order is that in which they are called: the file first, it must not miss a step."""


class Trackers:
    """Several trackers as one. A context manager: leaving it closes them all, also on an error or Ctrl-C."""

    def __init__(self, trackers: Sequence[Tracker]):
        self._trackers = list(trackers)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Passes the numbers of one step to every tracker."""
        for tracker in self._trackers:
            tracker.log(metrics, step)

    def flush(self) -> None:
        """Has what was logged outlast a kill of this process."""
        for tracker in self._trackers:
            tracker.flush()

    def close(self) -> None:
        """Closes every tracker, the last one first; a second call does nothing."""
        while self._trackers:
            self._trackers.pop().close()

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_trackers(
    names: Sequence[str],
    folder: Path,
    *,
    title: str = "",
    total_steps: int | None = None,
    run_id: str = "",
    done_steps: int = 0,
    redraws: bool = True,
) -> Trackers:
    """Opens the trackers of `trainer.logger`; the file is always among them. Makes `folder` where it is not there yet.

    The names are known ones: `checks.py` has seen to that. `run_id`, `done_steps`, `redraws`: see `RunInfo`.
    """
    assert set(names) <= set(TRACKERS), names
    folder.mkdir(parents=True, exist_ok=True)
    run = RunInfo(folder, title, total_steps, run_id, done_steps, seconds_of(folder), redraws)
    wanted = {"file", *names}
    return Trackers([factory(run) for name, factory in TRACKERS.items() if name in wanted])
