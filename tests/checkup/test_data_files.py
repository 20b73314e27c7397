"""Data files with the mistakes that users make; and longest prompts: one token per character makes them
countable."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkup.given import configured, findings, jsonl, parquet, row, states
from hypothesis import given
from hypothesis import strategies as st

from hydraflow.checkup import sampling
from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import Finding, State
from hydraflow.data.files import read_records


def look(data: Path | None, **keys: object) -> list[Finding]:
    return findings(CheckContext(configured("somewhere", data, **keys)), "data files")


def test_a_good_file(data: Path) -> None:
    [found] = look(data)
    assert found.state is State.OK
    assert "8 rows; prompt: list<" in found.evidence and "data_source: string" in found.evidence


def test_a_broken_parquet_does_not_hide_the_other_file(tmp_path: Path, data: Path) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_text("this is no parquet")
    bad, good = look(broken, data__val_files=str(data))
    assert bad.state is State.PROBLEM and "not a readable Parquet file" in bad.evidence
    assert good.state is State.OK


def test_a_parquet_that_is_cut_off(tmp_path: Path, data: Path) -> None:
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(data.read_bytes()[:-20])
    assert states(look(cut)) == [State.PROBLEM]


def test_a_missing_file() -> None:
    [found] = look(Path("/no/such/file.parquet"))
    assert found.state is State.PROBLEM and "no such file" in found.evidence


def test_a_missing_column_names_the_one_that_is_near(tmp_path: Path) -> None:
    rows = [{("prompts" if name == "prompt" else name): value for name, value in row().items()}]
    [found] = look(parquet(tmp_path / "data.parquet", rows))
    assert found.state is State.PROBLEM
    assert "has no column prompt; it has prompts, data_source" in found.evidence
    assert found.remedy == "data.prompt_key=prompts"
    assert states(look(tmp_path / "data.parquet", data__prompt_key="prompts")) == [State.OK]


def test_a_file_without_prompts_is_one_problem(model: Path, tmp_path: Path) -> None:
    rows = [{("question" if name == "prompt" else name): value for name, value in row().items()}] * 4
    context = CheckContext(configured(model, parquet(tmp_path / "train.parquet", rows)))
    [found] = findings(context, "data files")
    assert "has no column prompt" in found.evidence and "data.prompt_key=" in found.remedy
    for name in ("chat template", "prompt lengths"):
        assert states(findings(context, name)) == [State.SKIPPED]


def test_a_missing_reward_model(tmp_path: Path) -> None:
    rows = [{name: value for name, value in row().items() if name != "reward_model"}]
    [found] = look(jsonl(tmp_path / "data.jsonl", rows))
    assert found.state is State.PROBLEM and found.remedy == "write a column reward_model"


def test_rows_that_are_wrong_are_named(tmp_path: Path) -> None:
    rows = [
        row(),
        {**row(), "prompt": 7},
        {**row(), "reward_model": {"style": "rule"}},
        {**row(), "data_source": None},
    ]
    found = look(jsonl(tmp_path / "data.jsonl", rows))
    assert states(found) == [State.PROBLEM] * 3
    assert "row 1" in found[0].evidence and "row 2" in found[1].evidence and "row 3" in found[2].evidence


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    """A row has the same number here and in training."""
    file = jsonl(tmp_path / "data.jsonl", [row(), {**row(), "prompt": 7}])
    file.write_text("\n\n" + file.read_text())
    assert [record.row for record in sampling.sample(file, "data.train_files", 8)] == [0, 1]
    assert [record.row for record in read_records(str(file), key="data.train_files")] == [0, 1]
    [found] = look(file)
    assert "row 1" in found.evidence


@pytest.mark.parametrize(
    ("text", "said"),
    [("{not json}\n", "line 1 is not JSON"), ("[1]\n", "a JSON list"), ("\n\n", "no rows"), ("\xff", "")],
)
def test_lines_that_are_no_objects(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text, encoding="latin-1")
    [found] = look(path)
    assert found.state is State.PROBLEM and said in found.evidence


def test_an_ending_that_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("a,b\n")
    assert ".csv" in look(path)[0].evidence


def test_a_recipe_that_has_made_nothing_yet(tmp_path: Path) -> None:
    context = CheckContext(configured(recipe__name="arithmetic", recipe__cache_dir=str(tmp_path)))
    [found] = findings(context, "data files")
    assert (found.state, found.evidence) == (
        State.SKIPPED,
        "recipe=arithmetic makes its own when it first runs",
    )
    assert states(findings(context, "model files")) == [State.SKIPPED]


def test_samples_come_from_all_over_the_file(tmp_path: Path) -> None:
    rows = [row(f"{i}+1=") for i in range(100)]
    grouped = sampling.sample(parquet(tmp_path / "a.parquet", rows, group=10), "data.train_files", 20)
    # 3 of each of 8 row groups, until there are 20.
    assert [record.row for record in grouped][:6] == [0, 1, 2, 10, 11, 12]
    assert len(grouped) == 20
    assert all(record.values["prompt"][0]["content"] == f"{record.row}+1=" for record in grouped)
    lines = sampling.sample(jsonl(tmp_path / "a.jsonl", rows), "data.train_files", 4)
    assert [record.row for record in lines] == [0, 25, 50, 75]


@given(total=st.integers(0, 10_000), count=st.integers(1, 600))
def test_a_spread_takes_different_rows_from_the_first_on(total: int, count: int) -> None:
    places = list(sampling.spread(total, count))
    assert len(set(places)) == len(places) == min(total, count)
    assert places == sorted(places) and all(0 <= place < total for place in places)
    assert max((after - before for before, after in zip(places, places[1:])), default=0) <= -(-total // count)


def test_a_sample_of_a_small_file_is_all_of_it(data: Path) -> None:
    assert [record.row for record in sampling.sample(data, "data.train_files", 512)] == list(range(8))


def lengths(model: Path, data: Path, **keys: object) -> list[Finding]:
    return findings(CheckContext(configured(model, data, **keys)), "prompt lengths")


def prompts(tmp_path: Path, *lengths: int) -> Path:
    return parquet(tmp_path / "prompts.parquet", [row("1" * length) for length in lengths])


def test_prompts_that_fit(model: Path, tmp_path: Path) -> None:
    [found] = lengths(model, prompts(tmp_path, 3, 5, 16))
    assert found.state is State.OK
    assert (
        found.evidence
        == "data.train_files, all 3 rows: median 5 tokens, longest 16; data.max_prompt_length=16"
    )


def test_a_sample_is_called_one(model: Path, tmp_path: Path) -> None:
    [found] = lengths(model, prompts(tmp_path, *[4] * 600))
    assert "a sample of 512 of 600 rows" in found.evidence


def test_overlong_prompts_under_each_rule(model: Path, tmp_path: Path) -> None:
    data = prompts(tmp_path, 3, 5, 20)
    [refused] = lengths(model, data)
    assert refused.state is State.PROBLEM and "1 are longer" in refused.evidence
    assert (
        refused.remedy
        == "data.max_prompt_length=20 or data.filter_overlong_prompts=true or data.truncation=left"
    )
    assert states(lengths(model, data, data__filter_overlong_prompts=True)) == [State.NOTE]
    [cut] = lengths(model, data, data__truncation="left")
    assert cut.state is State.WARNING and "data.truncation=left shortens them" in cut.evidence
    assert states(lengths(model, data, data__max_prompt_length=20)) == [State.OK]


def test_filters_that_leave_nothing(model: Path, tmp_path: Path) -> None:
    assert states(lengths(model, prompts(tmp_path, 20, 30), data__filter_overlong_prompts=True)) == [
        State.PROBLEM
    ]


def test_rows_longer_than_the_model_s_positions(model: Path, tmp_path: Path) -> None:
    [found] = lengths(model, prompts(tmp_path, 10), data__max_response_length=1020)  # the model has 1024
    assert (found.state, found.remedy) == (State.PROBLEM, "data.max_response_length=1014")
