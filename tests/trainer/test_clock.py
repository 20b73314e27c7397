"""What trainer.max_wall_time understands."""

from __future__ import annotations

import pytest

from hydraflow.errors import ConfigError
from hydraflow.trainer.clock import Clock, parse_duration


@pytest.mark.parametrize(("text", "seconds"), [(90, 90.0), ("90", 90.0), ("90s", 90.0), ("8m", 480.0), ("1h30m", 5400.0), ("0.5h", 1800.0)])
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5", "8 minutes", "5m3", 0, "0s"])
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(ConfigError, match="trainer.max_wall_time"):
        parse_duration(text)


def test_no_limit() -> None:
    assert parse_duration(None) is None
    assert not Clock(None).is_over()


def test_a_clock_runs_out() -> None:
    assert Clock(1e-9).is_over()
    assert not Clock(1000.0).is_over()
