"""What trainer.max_wall_time understands."""

from __future__ import annotations

import pytest

from hydraflow.compose.rules import problems
from hydraflow.schema import SFTConfig
from hydraflow.system.durations import seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90.0),
        ("90", 90.0),
        ("90s", 90.0),
        ("8m", 480.0),
        ("1h30m", 5400.0),
        ("0.5h", 1800.0),
        (1e-5, 1e-5),
    ],
)
def test_durations(text: object, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "-5",
        "8 minutes",
        "5m3",
        0,
        "0s",
        -1.0,
        float("inf"),
        float("nan"),
        True,
        None,
        [8],
        10**400,
    ],
)
def test_what_is_no_duration(text: object) -> None:
    assert seconds_of(text) is None


def test_a_wrong_one_is_reported_with_all_other_mistakes() -> None:
    config = SFTConfig()
    config.trainer.max_wall_time, config.optim.lr = "soon", -1.0
    found = {problem.field: problem.remedy for problem in problems(config, planning=True)}
    assert found == {"trainer.max_wall_time": "trainer.max_wall_time=8m", "optim.lr": "optim.lr=1e-05"}
