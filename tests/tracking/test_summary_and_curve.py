"""The end of a run: six numbers, a table, and a picture."""

import io
import math
from pathlib import Path

import matplotlib.image
import pytest
from rich.console import Console

from hydraflow.tracking.base import RunInfo
from hydraflow.tracking.console import LiveConsole
from hydraflow.tracking.curve import draw_curve
from hydraflow.tracking.summary import print_summary, summarise
from hydraflow.tracking.trackers import open_trackers

ACCURACY = "val-core/sums/acc/mean@1"


def make_run(folder: Path, accuracies: list[float]) -> None:
    with open_trackers([], RunInfo(folder)) as trackers:
        for step, accuracy in enumerate(accuracies):
            trackers.log({ACCURACY: accuracy, "critic/score/mean": accuracy / 2}, step)


def test_first_last_and_best(tmp_path: Path) -> None:
    make_run(tmp_path, [0.25, 0.75, math.nan, 0.5])
    summary = summarise(tmp_path, seconds=61.04, why_it_ended="time limit")
    assert (summary.first_val_accuracy, summary.last_val_accuracy, summary.best_val_accuracy) == (
        0.25,
        0.5,
        0.75,
    )
    assert (summary.steps, summary.seconds, summary.why_it_ended) == (3, 61.0, "time limit")


def test_a_run_that_logged_nothing_has_a_summary(tmp_path: Path) -> None:
    summary = summarise(tmp_path, seconds=1.0, why_it_ended="interrupted")
    assert (summary.first_val_accuracy, summary.best_val_accuracy, summary.steps) == (None, None, 0)


def test_the_printed_path_is_whole_on_a_narrow_terminal(tmp_path: Path) -> None:
    make_run(tmp_path, [0.25, 0.75, 0.5])
    text = io.StringIO()
    folder = tmp_path / ("long-" * 30 + "[bold]name")
    print_summary(
        summarise(tmp_path, seconds=61, why_it_ended="all steps done"), folder, Console(file=text, width=60)
    )
    assert f"run folder: {folder}\n" in text.getvalue()
    assert "2 steps in 1m01s; ended because: all steps done" in text.getvalue()
    for percent in ("25.0%", "50.0%", "75.0%"):
        assert percent in text.getvalue()


def test_curve_is_a_picture_with_a_row_for_each_kind_of_number(tmp_path: Path) -> None:
    make_run(tmp_path, [0.25, 0.75, 0.5])
    assert draw_curve(tmp_path, tmp_path / "curve.png", title="tiny")
    image = matplotlib.image.imread(tmp_path / "curve.png")
    assert image.shape[:2] == (720, 1200)  # two rows: (0.6 + 2 * 2.7) inches at 120 dots
    assert image[..., :3].std() > 0.01  # not one flat colour


@pytest.mark.parametrize("title", [r"a$\\alpa$b", "lr_$1e-3$", "run[/x]"])
def test_a_title_is_plain_text(tmp_path: Path, title: str) -> None:
    """Nothing in an experiment's name is mathematics or a style."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "seconds": 1.0, "critic/score/mean": 0.5}\n')
    assert draw_curve(tmp_path, tmp_path / "curve.png", title=title)
    with io.StringIO() as out:
        console = LiveConsole(RunInfo(tmp_path, title=title, total_steps=2))
        console.close()
        Console(file=out, width=80).print(console._render())
        assert title in out.getvalue()


def test_nothing_to_draw_makes_no_file(tmp_path: Path) -> None:
    assert not draw_curve(tmp_path, tmp_path / "curve.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("first", "values", "words"),
    [
        (0, [0.25, 0.5], ["validation accuracy", "first ", "25.0%"]),
        (3, [0.25], ["validation accuracy", "first (step 3)", "25.0%"]),
        (0, [-302.5, 1.25], ["validation reward", "-302.5", "1.25"]),
    ],
)
def test_what_is_no_share_is_no_percentage(
    tmp_path: Path, first: int, values: list[float], words: list[str]
) -> None:
    with open_trackers([], RunInfo(tmp_path)) as trackers:
        for step, value in enumerate(values, first):
            trackers.log({ACCURACY: value}, step)
    text = io.StringIO()
    found = summarise(tmp_path, seconds=1, why_it_ended="all steps done")
    print_summary(found, tmp_path, Console(file=text, width=100))
    assert all(word in text.getvalue() for word in words), text.getvalue()
