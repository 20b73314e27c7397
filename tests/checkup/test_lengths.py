"""Longest prompts: one token per character makes them countable."""

from __future__ import annotations

from pathlib import Path

from checkup.given import configured, findings, parquet, row, states

from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import Finding, State


def look(model: Path, data: Path, **keys: object) -> list[Finding]:
    return findings(CheckContext(configured(model, data, **keys)), "prompt lengths")


def prompts(tmp_path: Path, *lengths: int) -> Path:
    return parquet(tmp_path / "prompts.parquet", [row("1" * length) for length in lengths])


def test_all_fit(model: Path, tmp_path: Path) -> None:
    [found] = look(model, prompts(tmp_path, 3, 5, 16))
    assert found.state is State.OK
    assert (
        found.evidence
        == "data.train_files, all 3 rows: median 5 tokens, longest 16; data.max_prompt_length=16"
    )


def test_a_sample_is_called_one(model: Path, tmp_path: Path) -> None:
    [found] = look(model, prompts(tmp_path, *[4] * 600))
    assert "a sample of 512 of 600 rows" in found.evidence


def test_overlong_prompts_under_each_rule(model: Path, tmp_path: Path) -> None:
    data = prompts(tmp_path, 3, 5, 20)
    [refused] = look(model, data)
    assert refused.state is State.PROBLEM and "1 are longer" in refused.evidence
    assert (
        refused.remedy
        == "data.max_prompt_length=20 or data.filter_overlong_prompts=true or data.truncation=left"
    )
    assert states(look(model, data, data__filter_overlong_prompts=True)) == [State.NOTE]
    [cut] = look(model, data, data__truncation="left")
    assert cut.state is State.WARNING and "lose their left part" in cut.evidence
    assert states(look(model, data, data__max_prompt_length=20)) == [State.OK]


def test_filters_that_leave_nothing(model: Path, tmp_path: Path) -> None:
    assert states(look(model, prompts(tmp_path, 20, 30), data__filter_overlong_prompts=True)) == [
        State.PROBLEM
    ]


def test_rows_longer_than_the_model_s_positions(model: Path, tmp_path: Path) -> None:
    [found] = look(model, prompts(tmp_path, 10), data__max_response_length=1020)  # the model has 1024
    assert (found.state, found.remedy) == (State.PROBLEM, "data.max_response_length=1014")
