"""When trainer.max_wall_time ends a run."""

from __future__ import annotations

from hydraflow.trainer.clock import Clock, parse_duration


def test_no_limit() -> None:
    assert parse_duration(None) is None
    assert Clock(None).why_to_stop() == ""


def test_a_clock_runs_out() -> None:
    assert Clock(1e-9).why_to_stop() == "trainer.max_wall_time reached"
    assert Clock(1000.0).why_to_stop() == ""
