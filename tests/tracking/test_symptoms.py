"""Runs that go through their steps without learning, from rows of metrics written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hydraflow.tracking.base import RunInfo
from hydraflow.tracking.summary import summarise
from hydraflow.tracking.symptoms import SymptomWatch, symptoms_of
from hydraflow.tracking.trackers import open_trackers

HEALTHY = {
    "critic/advantages/max": 1.5,
    "critic/advantages/min": -1.0,
    "critic/score/mean": 0.4,
    "critic/score/max": 1.0,
    "critic/score/min": 0.0,
    "actor/entropy": 1.2,
    "response_length/clip_ratio": 0.1,
    "actor/lr": 1e-6,
}
NO_SIGNAL = {"critic/advantages/max": 0.0, "critic/advantages/min": 0.0}
COLLAPSED = {"actor/entropy": 0.01}
CUT_OFF = {"response_length/clip_ratio": 1.0}


def said(*changes: dict[str, float]) -> list[str]:
    """What is said of steps that are healthy but for these changes."""
    return symptoms_of((step, HEALTHY | change) for step, change in enumerate(changes, 1))


def test_a_healthy_run_has_none() -> None:
    assert said(*[{}] * 20) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (NO_SIGNAL, "every advantage is the same"),
        (COLLAPSED, "the entropy has collapsed"),
        (CUT_OFF, "every response is truncated at the length limit"),
    ],
)
def test_three_steps_in_a_row_are_said_once(change: dict[str, float], words: str) -> None:
    assert said({}, change, change, {}, change, change) == [], "two in a row may be chance"
    [sentence] = said({}, change, {}, *[change] * 3, {}, *[change] * 5)
    assert sentence.startswith(f"steps 4 to 6: {words}") and "\n" not in sentence


def test_held_out_accuracy_that_falls_is_said_once() -> None:
    """Validations count, not the steps between them."""
    name = "val-core/sums/acc/mean@1"

    def rows(*accuracies: float) -> list[dict[str, float]]:
        return [row for accuracy in accuracies for row in ({name: accuracy}, {}, {})]

    assert said(*rows(0.7, 0.8, 0.9, 0.5, 0.4, 0.52, 0.4)) == [], "two in a row may be chance"
    [sentence] = said(*rows(0.7, 0.8, 0.9, 0.4, 0.8, 0.49, 0.2, 0.4, 0.1))
    assert sentence.startswith("steps 16 to 22: held-out accuracy is at least 0.3 below the best so far")
    assert said(*rows(0.0, 0.0, 0.8, 0.0, 0.0, 0.0)) == [], "a best validation may be chance, too"
    for scores in ([4.0, 4.0, 4.0, 1.0, 1.0, 1.0], [-0.9, -0.6, -0.3, -0.9, -0.9, -0.9]):
        assert said(*rows(*scores)) == [], "no accuracy"
    [sentence] = said(*[{"val/accuracy": accuracy} for accuracy in (0.5, 0.5, 0.5, 0.1, 0.1, 0.1)])
    assert sentence.startswith("steps 4 to 6: ")


def test_a_step_without_the_numbers_neither_ends_nor_extends_the_row() -> None:
    watch = SymptomWatch()
    validation = {"val-core/sums/acc/mean@1": 0.0}
    rows = [NO_SIGNAL, validation, NO_SIGNAL, validation, validation]
    assert not [text for step, row in enumerate(rows) for text in watch.after(step, row)]
    assert len(watch.after(9, NO_SIGNAL)) == 1


def test_advantages_on_one_side_of_0_are_a_signal() -> None:
    assert said(*[{"critic/advantages/max": 0.0}] * 3) == []


def test_where_teachers_alone_teach_advantages_do_not_count() -> None:
    taught = NO_SIGNAL | {"actor/distillation_loss": 0.3}
    assert said(*[taught] * 4) == []
    assert len(said(*[taught | {"actor/pg_loss": 0.0}] * 4)) == 1, "the rewards are to count, too"


def test_low_entropy_is_no_collapse_where_the_task_is_learned_or_where_it_began_low() -> None:
    assert said({}, *[COLLAPSED | {"critic/score/mean": 0.95}] * 4) == []
    assert said(*[{"actor/entropy": 0.02}] * 4) == []
    assert len(said({}, *[COLLAPSED | {"critic/score/mean": 0.85}] * 4)) == 1
    alike = {f"critic/score/{name}": 0.0 for name in ("mean", "max", "min")}
    assert len(said(alike, *[COLLAPSED | alike] * 3)) == 1, "no score was ever higher"


def test_a_learning_rate_of_0_counts_from_the_first_step_on() -> None:
    idle = {"actor/lr": 0.0}
    assert said(idle, idle, {}) == [], "a warm-up rises from 0"
    assert said({}, idle, idle, idle) == [], "a decay ends at 0"
    [sentence] = said(idle, idle, idle, idle)
    assert sentence.startswith("steps 1 to 3: the learning rate has been 0 in every step")
    assert len(symptoms_of((step, {"train/lr": 0.0}) for step in range(1, 4))) == 1


def test_the_trackers_warn_and_the_summary_repeats_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_trackers([], RunInfo(tmp_path)) as trackers:
        for step in range(1, 6):
            trackers.log(HEALTHY | CUT_OFF, step)
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    summary = summarise(tmp_path, seconds=1.0, why_it_ended="all steps done")
    assert summary.symptoms == [warning] and "steps 1 to 3: every response" in warning
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(row.keys() == {"step", "seconds"} | HEALTHY.keys() for row in rows)


def test_a_resumed_run_counts_its_earlier_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for done, steps in ((0, [1, 2, 3]), (2, [3, 4, 5])):  # the second start repeats step 3
        with open_trackers([], RunInfo(tmp_path, done_steps=done)) as trackers:
            for step in steps:
                trackers.log(HEALTHY | (CUT_OFF if step > 1 else {}) | (COLLAPSED if step > 3 else {}), step)
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("steps 2 to 4: every response")
