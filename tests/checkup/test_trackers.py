"""Trackers, by using them."""

from __future__ import annotations

from pathlib import Path

from checkup.given import configured, findings, states

from hydraflow.checkup.facts import Facts
from hydraflow.checkup.finding import State
from hydraflow.checkup.trackers import TRACKER_CHECKS
from hydraflow.tracking.trackers import TRACKERS


def test_every_tracker_has_a_check() -> None:
    assert set(TRACKER_CHECKS) == set(TRACKERS)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    file, *others = findings(Facts(configured(trainer__default_local_dir=str(blocked / "run"))), "trackers")
    assert file.state is State.PROBLEM and "trainer.default_local_dir" in file.remedy
    assert states(others) == [State.OK, State.OK]
    assert not (tmp_path / "run").exists()


def test_trackers_write_what_they_are_given(tmp_path: Path) -> None:
    found = findings(Facts(configured(trainer__default_local_dir=str(tmp_path / "run"))), "trackers, used")
    assert [(finding.state, finding.evidence.split()[0]) for finding in found] == [(State.OK, "file"), (State.OK, "tensorboard")]
    assert not (tmp_path / "run").exists(), "nothing is left behind"
