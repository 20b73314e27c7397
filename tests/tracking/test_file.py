"""metrics.jsonl: what is written is valid JSON at once, and reads back as it was."""

import json
import math
from pathlib import Path

import pytest

from hydraflow.errors import EnvironmentFault
from hydraflow.tracking.base import RunInfo
from hydraflow.tracking.file import FileTracker
from hydraflow.tracking.history import curve, read_metrics, training_reward, validation_accuracy


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


def test_a_full_disk_is_a_fault_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    tracker = FileTracker(RunInfo(tmp_path, "", None))
    with pytest.raises(EnvironmentFault, match="No space left") as caught:
        tracker.log({"a": 1.0}, 1)
    assert caught.value.exit_code == 3


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
    assert [(point.step, point.value) for point in curve(records, validation_accuracy)] == [(0, 0.25), (1, 0.75)]
    assert [(point.step, point.value) for point in curve(records, training_reward)] == [(1, 0.5)]


def test_accuracy_falls_back_to_reward_and_ignores_other_statistics() -> None:
    assert validation_accuracy({"val-core/a/reward/mean@1": 0.5, "val-aux/a/reward/std@1": 9.0}) == 0.5
    assert validation_accuracy({"val-core/a/acc/mean@4": 0.5, "val-core/a/acc/best@4/mean": 0.9, "val-core/a/reward/mean@4": 7.0}) == 0.5
    assert validation_accuracy({"val/accuracy": 0.25, "val/loss": 1.0}) == 0.25
    assert validation_accuracy({"critic/score/mean": 0.5}) is None


def test_no_file_means_no_records(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
