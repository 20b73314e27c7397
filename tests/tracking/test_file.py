"""metrics.jsonl: what is written is valid JSON at once, and reads back as it was."""

import errno
import io
import json
import math
import os
from pathlib import Path

import pytest

from hydraflow.errors import EnvironmentFault
from hydraflow.tracking.base import RunInfo
from hydraflow.tracking.file import FileTracker
from hydraflow.tracking.history import curve, read_metrics, validation_accuracy


def forbid_constant(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")


def test_each_line_is_on_disk_before_the_next_call(tmp_path: Path) -> None:
    tracker = FileTracker(RunInfo(tmp_path, "", None))
    for step in (1, 2):
        tracker.log({"critic/score/mean": step / 4}, step)
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == step
        assert json.loads(lines[-1])["critic/score/mean"] == step / 4
    tracker.close()


def test_nan_and_infinity_are_valid_json_and_read_back(tmp_path: Path) -> None:
    tracker = FileTracker(RunInfo(tmp_path, "", None))
    tracker.log({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5}, 7)
    tracker.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=forbid_constant)["b"] == "inf"
    (record,) = read_metrics(tmp_path)
    assert math.isnan(record["a"])
    assert (record["b"], record["c"], record["d"], record["step"]) == (math.inf, -math.inf, 1.5, 7)


def test_a_full_disk_is_lived_through(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = FileTracker(RunInfo(tmp_path, "", None))
    tracker._file = Disk(tracker._file, 0, errno.ENOSPC, stays_full=True)  # type: ignore[assignment, arg-type]
    tracker.log({"a": 1.0}, 1)
    tracker.log({"a": 2.0}, 2)
    assert caplog.text.count("No space left on device; metrics are held in memory") == 1
    with pytest.raises(OSError, match="No space left on device"):
        tracker.flush()
    tracker.close()
    assert "its last lines are lost" in caplog.text


class Disk:
    """A file that has room for `room` bytes at first, and after one refusal for all, if it does not stay
    full."""

    def __init__(self, file: io.FileIO, room: int, error: int, stays_full: bool = False):
        self.file, self.room, self.error, self.stays_full = file, room, error, stays_full

    def write(self, data: bytes) -> int:
        if self.room == 0:
            self.room = 0 if self.stays_full else 10**6
            raise OSError(self.error, os.strerror(self.error))
        written = self.file.write(data[: self.room])
        self.room -= written
        return written

    def close(self) -> None:
        self.file.close()


def test_lines_that_a_full_disk_cut_are_completed_when_there_is_room(tmp_path: Path) -> None:
    tracker = FileTracker(RunInfo(tmp_path, "", None))
    tracker._file = Disk(tracker._file, 7, errno.ENOSPC)  # type: ignore[assignment, arg-type]
    for step in (1, 2):
        tracker.log({"a": 0.5 * step}, step)
    tracker.close()
    assert [(record["step"], record["a"]) for record in read_metrics(tmp_path)] == [(1, 0.5), (2, 1.0)]


def test_another_fault_of_the_disk_ends_the_run(tmp_path: Path) -> None:
    tracker = FileTracker(RunInfo(tmp_path, "", None))
    tracker._file = Disk(tracker._file, 0, errno.EIO)  # type: ignore[assignment, arg-type]
    with pytest.raises(EnvironmentFault, match="Input/output error") as caught:
        tracker.log({"a": 1.0}, 1)
    assert caught.value.exit_code == 3


def test_the_clock_of_a_run_goes_on(tmp_path: Path) -> None:
    tracker = FileTracker(RunInfo(tmp_path, "", None, seconds_before=100.0))
    tracker.log({}, 1)
    tracker.close()
    assert 100.0 <= read_metrics(tmp_path)[0]["seconds"] < 110.0


def test_lines_of_one_step_are_merged_and_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    tracker = FileTracker(RunInfo(tmp_path, "", None))
    tracker.log({"val-core/sums/acc/mean@1": 0.25}, 0)
    tracker.log({"critic/score/mean": 0.5}, 1)
    tracker.log({"val-core/sums/acc/mean@1": 0.75}, 1)
    tracker.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "sec')
    records = read_metrics(tmp_path)
    assert [record["step"] for record in records] == [0, 1]
    assert [(point.step, point.value) for point in curve(records, validation_accuracy)] == [
        (0, 0.25),
        (1, 0.75),
    ]
    rewards = curve(records, lambda record: record.get("critic/score/mean"))
    assert [(point.step, point.value) for point in rewards] == [(1, 0.5)]


def test_accuracy_falls_back_to_reward_and_ignores_other_statistics() -> None:
    assert validation_accuracy({"val-core/a/reward/mean@1": 0.5, "val-aux/a/reward/std@1": 9.0}) == 0.5
    assert (
        validation_accuracy(
            {"val-core/a/acc/mean@4": 0.5, "val-core/a/acc/best@4/mean": 0.9, "val-core/a/reward/mean@4": 7.0}
        )
        == 0.5
    )
    assert validation_accuracy({"val/accuracy": 0.25, "val/loss": 1.0}) == 0.25
    assert validation_accuracy({"critic/score/mean": 0.5}) is None


def test_no_file_means_no_records(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
