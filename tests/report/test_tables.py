"""The page's numbers, by hand: phase times, key numbers, differences, versions."""

from __future__ import annotations

from pathlib import Path

from report.runs import ACCURACY, record, write_run

from hydraflow.report import tables
from hydraflow.report.reading import read_run
from hydraflow.report.series import Axes


def test_phases_fill_the_step_and_the_longest_comes_first(tmp_path: Path) -> None:
    rows = [record(step) for step in (1, 2)]
    rows[1]["timing_s/testing"] = 2.0
    run = read_run(write_run(tmp_path / "run", rows))
    data, table = tables.phases(run, Axes(), most=100)
    parts = {part["name"]: part["y"] for part in data["parts"]}
    assert parts == {
        "testing": [0, 2],
        "gen": [0.5, 0.5],
        "update_actor": [0.25, 0.25],
        "reward": [0.125, 0.125],
        "rest of the step": [0.125] * 2,
    }
    assert [row["name"] for row in table][:2] == ["testing", "gen"]
    assert table[0] == {"name": "testing", "total": "2 s", "share": "50.0 %", "mean": "1"}


def test_phases_of_a_run_without_times(tmp_path: Path) -> None:
    assert tables.phases(
        read_run(write_run(tmp_path / "run", [{"step": 1, "seconds": 1.0, "a": 1.0}])), Axes(), 10
    ) == ({}, [])


def test_small_phases_are_drawn_together(tmp_path: Path) -> None:
    rows = [record(1, **{f"timing_s/small{number}": 0.001 for number in range(9)})]
    data, table = tables.phases(read_run(write_run(tmp_path / "run", rows)), Axes(), most=100)
    assert data["parts"][-1] == {"name": "others", "y": [0.009]}
    assert len(table) == 13, "the table has them all"


def test_key_numbers(tmp_path: Path) -> None:
    rows = [record(step, **{ACCURACY: value}) for step, value in ((1, 0.25), (2, 1.0), (3, 0.5))]
    found = dict(tables.key_numbers([read_run(write_run(tmp_path / "run", rows))]))
    assert found["Validation accuracy"] == ["0.25 → 0.5 (best 1)"]
    assert found["Training steps"] == ["3 of 100"]
    assert found["Wall time"] == ["4s"]
    assert found["Throughput, median"] == ["100 tokens/s per device"]
    assert "Training loss" not in found


def test_differences_of_configurations(tmp_path: Path) -> None:
    first = write_run(
        tmp_path / "a", [], settings={"seed": (1, "default"), "lr": (0.1, "default"), "old": ("x", "default")}
    )
    second = write_run(tmp_path / "b", [], settings={"seed": (1, "command line"), "lr": (0.2, "default")})
    bare = tmp_path / "c"
    bare.mkdir()
    (bare / "plan.json").write_text("{}")
    rows = tables.differences([read_run(folder) for folder in (first, second, bare)])
    assert rows == [{"key": "lr", "values": ["0.1", "0.2", "–"]}, {"key": "old", "values": ["x", "–", "–"]}]
    assert tables.differences([read_run(first)]) == []


def test_versions_that_differ_are_marked(tmp_path: Path) -> None:
    git = {"commit": "0123456789abcdef", "branch": "main", "changed_files": 1}
    one = write_run(
        tmp_path / "a",
        [],
        starts=[{"versions": {"torch": "2.1"}}, {"versions": {"torch": "2.2", "ray": "2.6"}, "git": git}],
    )
    two = write_run(tmp_path / "b", [], starts=[{"versions": {"torch": "2.3", "ray": "2.6"}}])
    found = {
        row["name"]: (row["values"], row["differs"])
        for row in tables.versions([read_run(one), read_run(two)])
    }
    assert found["torch"] == (["2.2", "2.3"], True) and found["ray"] == (["2.6", "2.6"], False)
    assert found["git"] == (["0123456789 on main, 1 file changed since", "–"], False)


def test_five_validations_spread_over_the_run(tmp_path: Path) -> None:
    rows = [{"output": str(number), "score": 0.0} for number in range(30)]
    run = read_run(write_run(tmp_path / "run", [], samples={step: rows for step in range(0, 100, 10)}))
    shown = tables.samples(run)
    assert [validation["step"] for validation in shown] == [90, 70, 40, 20, 0]
    assert (
        shown[0]["names"] == ["output", "score"] and len(shown[0]["rows"]) == 20 and shown[0]["count"] == 30
    )


def test_accuracy_is_over_the_sources_that_a_validation_measured(tmp_path: Path) -> None:
    a, b = "val-core/a/acc/mean@1", "val-core/b/acc/mean@1"
    rows = [record(0, **{a: 0.1, b: 0.5}), record(10, **{a: 0.3, b: 0.5}), record(20, **{b: 0.75})]
    found = dict(tables.key_numbers([read_run(write_run(tmp_path / "run", rows))]))
    assert found["Validation accuracy"] == ["0.3 → 0.75 (best 0.75)"]
