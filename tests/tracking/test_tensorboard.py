"""TensorBoard after a stop: one curve, in which the steps that were done again show once."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hydraflow.tracking.trackers import open_trackers


def test_steps_after_the_checkpoint_are_hidden(tmp_path: Path) -> None:
    with open_trackers(["tensorboard"], tmp_path) as trackers:
        for step in range(5):
            trackers.log({"loss": float(step)}, step)
    with open_trackers(["tensorboard"], tmp_path, done_steps=2) as trackers:
        for step in range(3, 7):
            trackers.log({"loss": 10.0 + step}, step)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        *[(0, 0.0), (1, 1.0), (2, 2.0)],
        *[(3, 13.0), (4, 14.0), (5, 15.0), (6, 16.0)],
    ]
