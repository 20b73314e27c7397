"""TensorBoard after a stop: one curve, in which the steps that were done again show once."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.tensorflow_stub.io import gfile

from hydraflow.tracking.base import RunInfo
from hydraflow.tracking.tensorboard import TensorboardTracker
from hydraflow.tracking.trackers import open_trackers


def test_steps_after_the_checkpoint_are_hidden(tmp_path: Path) -> None:
    with open_trackers(["tensorboard"], RunInfo(tmp_path)) as trackers:
        for step in range(5):
            trackers.log({"loss": float(step)}, step)
    with open_trackers(["tensorboard"], RunInfo(tmp_path, done_steps=2)) as trackers:
        for step in range(3, 7):
            trackers.log({"loss": 10.0 + step}, step)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        *[(0, 0.0), (1, 1.0), (2, 2.0)],
        *[(3, 13.0), (4, 14.0), (5, 15.0), (6, 16.0)],
    ]


def test_a_step_is_one_event_whatever_the_number_of_metrics(tmp_path: Path) -> None:
    with open_trackers(["tensorboard"], RunInfo(tmp_path)) as trackers:
        for step in range(3):
            trackers.log({f"loss/{number}": number / 2 for number in range(5)}, step)
    [file] = (tmp_path / "tensorboard").iterdir()
    found = [event for event in EventFileLoader(str(file)).Load() if event.summary.value]
    assert [(event.step, len(event.summary.value)) for event in found] == [(0, 5), (1, 5), (2, 5)]


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # TensorBoard's own thread dies of it
def test_a_full_disk_costs_points_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    tracker = TensorboardTracker(RunInfo(tmp_path, "", None))
    tracker.log({"loss": 0.0}, 0)
    tracker.flush()
    with monkeypatch.context() as patch:
        patch.setattr(gfile.LocalFileSystem, "append", full)
        tracker.log({"loss": 1.0}, 1)
        tracker.flush()
        assert "No space left on device; its curves will lack points until there is room" in caplog.text
        tracker.log({"loss": 2.0}, 2)
        assert caplog.text.count("No space left") == 1, "it is left alone for a while"
    monkeypatch.setattr(tracker, "_next_try", 0.0)
    tracker.log({"loss": 3.0}, 3)
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 0.0), (3, 3.0)]
