"""Whether what a configuration names is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydraflow.system.paths import file_problems, listed, model_problems


def rules(problems: list) -> list[str]:
    return [f"{problem.field}: {problem.rule}" for problem in problems]


def test_each_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "here.parquet").touch()
    files = [str(tmp_path / "here.parquet"), str(tmp_path / "gone.parquet"), str(tmp_path)]
    assert rules(file_problems(files, "k")) == ["k: no such file", "k: is a folder, not a file"]
    assert file_problems(files[0], "k") == []


@pytest.mark.parametrize("files", [[], 3, [3], None, {}])
def test_what_is_no_list_of_files(files: object) -> None:
    assert listed(files) is None
    assert rules(file_problems(files, "k")) == ["k: must be a Parquet or JSONL file, or a list of them"]


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").touch()
    assert listed("~/a.parquet") == [tmp_path / "a.parquet"]
    assert model_problems("~", "k") == []
    assert rules(model_problems("~/gone", "k")) == ["k: there is no such directory"]


def test_a_model_is_a_folder_with_a_config_or_a_name_on_the_hub(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.touch()
    assert rules(model_problems(str(tmp_path), "k")) == [
        "k: this directory has no config.json, so it is not a Hugging Face model"
    ]
    [problem] = model_problems(str(weights), "k")
    assert (problem.rule, problem.remedy) == ("is a file, not a directory", f"k={tmp_path}")
    assert rules(model_problems("models/of/mine", "k")) == ["k: there is no such directory"]
    assert model_problems("org/name", "k") == []
