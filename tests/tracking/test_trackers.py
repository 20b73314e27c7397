"""The trackers together: the file that is always there, the event file, and closing."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hydraflow.errors import EnvironmentFault
from hydraflow.tracking.base import RunInfo
from hydraflow.tracking.symptoms import SymptomWatch
from hydraflow.tracking.trackers import Trackers, open_trackers


def test_the_file_is_written_without_being_asked_for(tmp_path: Path) -> None:
    with open_trackers([], RunInfo(tmp_path)) as trackers:
        trackers.log({"a": 1.0}, 1)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    with open_trackers(["tensorboard"], RunInfo(tmp_path)) as trackers:
        for step in (1, 2, 3):
            trackers.log({"critic/score/mean": step / 4}, step)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("critic/score/mean")] == [
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
    ]


def test_an_interrupt_closes_every_tracker(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), open_trackers([], RunInfo(tmp_path)) as trackers:
        file = trackers._trackers[0]._file  # type: ignore[attr-defined]
        raise KeyboardInterrupt
    assert file.closed
    trackers.close()


class Closing:
    """A tracker that notes that it is closed, and raises then."""

    def __init__(self, fault: BaseException | None = None):
        self.fault, self.closed = fault, False

    def close(self, *, failed: bool = False) -> None:
        self.closed = True
        if self.fault is not None:
            raise self.fault


@pytest.mark.parametrize(
    "fault", [OSError(122, "Disk quota exceeded"), RuntimeError("a library"), EnvironmentFault("no room")]
)
def test_one_that_cannot_be_closed_costs_a_warning(
    fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    all_of_them = [Closing(), Closing(fault), Closing()]
    Trackers(all_of_them, SymptomWatch()).close()  # type: ignore[arg-type]
    assert all(one.closed for one in all_of_them)
    assert f"a tracker could not be closed (Closing: {fault})" in caplog.text


def test_a_ctrl_c_in_one_leaves_none_open() -> None:
    all_of_them = [Closing(), Closing(KeyboardInterrupt()), Closing()]
    with pytest.raises(KeyboardInterrupt):
        Trackers(all_of_them, SymptomWatch()).close()  # type: ignore[arg-type]
    assert all(one.closed for one in all_of_them)
