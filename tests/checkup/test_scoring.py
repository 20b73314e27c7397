"""Reward functions that work, raise, hang and end their process, in the processes that score."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from checkup.given import configured, findings, jsonl, parquet, row

from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import Finding, State


def look(data: Path, function: Path | None = None, **keys: object) -> Finding:
    custom = {"reward__custom_reward_function__path": str(function)} if function else {}
    [found] = findings(CheckContext(configured(None, data, **custom, **keys)), "reward function")
    return found


def function(tmp_path: Path, body: str, before: str = "") -> Path:
    path = tmp_path / "reward.py"
    path.write_text(
        f"{before}\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n    {body}\n"
    )
    return path


def test_a_built_in_function(data: Path) -> None:
    found = look(data)
    assert (found.state, found.evidence) == (
        State.OK,
        "3 rows of arithmetic: the ground truth scores 1, an empty response 0",
    )


def test_a_recipe_s_rows_are_scored_before_they_are_made(tmp_path: Path) -> None:
    context = CheckContext(configured(recipe__name="arithmetic", recipe__cache_dir=str(tmp_path)))
    [found] = findings(context, "reward function")
    assert found.state is State.OK


def test_a_source_that_nothing_scores(tmp_path: Path) -> None:
    found = look(parquet(tmp_path / "d.parquet", [row(source="mine")] * 3))
    assert found.state is State.PROBLEM and "no built-in reward function" in found.evidence


def test_rows_without_a_ground_truth_are_left_to_the_check_of_the_files(tmp_path: Path) -> None:
    found = look(jsonl(tmp_path / "d.jsonl", [{"prompt": "1+1="}]))
    assert found.state is State.SKIPPED and "see data files" in found.evidence


def test_a_function_that_raises(tmp_path: Path, data: Path) -> None:
    found = look(data, function(tmp_path, "raise KeyError('answer')"))
    assert found.state is State.PROBLEM
    assert "6 of 6 responses to 3 rows could not be scored: KeyError: 'answer'" in found.evidence


def test_a_function_that_raises_for_some(tmp_path: Path, data: Path) -> None:
    found = look(data, function(tmp_path, "return float(int(solution_str) == int(ground_truth))"))
    assert (
        found.state is State.WARNING
        and "3 of 6 responses" in found.evidence
        and "ValueError" in found.evidence
    )


def test_a_function_that_hangs(tmp_path: Path, data: Path) -> None:
    began = time.monotonic()
    found = look(data, function(tmp_path, "import time; time.sleep(60)"), reward__timeout=0.3)
    assert found.state is State.PROBLEM and "took longer than 0.3 seconds" in found.evidence
    assert time.monotonic() - began < 30


def test_a_function_that_ends_its_process(tmp_path: Path, data: Path) -> None:
    found = look(data, function(tmp_path, "import os; os._exit(9)"))
    assert found.state is State.PROBLEM and "exit code 9" in found.evidence


def test_a_file_that_cannot_be_imported(tmp_path: Path, data: Path) -> None:
    found = look(data, function(tmp_path, "return 1.0", before="import no_such_module_anywhere"))
    assert found.state is State.PROBLEM and "no_such_module_anywhere" in found.evidence


def test_a_function_that_sees_no_difference(tmp_path: Path, data: Path) -> None:
    found = look(data, function(tmp_path, "return 0.5"))
    assert found.state is State.NOTE and "no difference" in found.evidence


@pytest.mark.parametrize("body", ["return 'good'", "return float('nan')", "return {'acc': 1}"])
def test_values_that_are_no_scores(tmp_path: Path, data: Path, body: str) -> None:
    assert look(data, function(tmp_path, body)).state is State.PROBLEM
