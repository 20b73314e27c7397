"""The user's reward function: what is wrong with it is said before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydraflow.errors import ConfigError
from hydraflow.rewards.config import CustomRewardConfig, RewardConfig
from hydraflow.rewards.custom import load_function
from hydraflow.rewards.pool import check_function
from hydraflow.rewards.selection import check_sources

GOOD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info, scale=1.0):\n    return scale *"
    " len(solution_str)\n"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.py"


def message(file: Path, source: str, name: str = "compute_score", **reward_kwargs: object) -> str:
    file.write_text(source)
    with pytest.raises(ConfigError) as caught:
        load_function(file, name, reward_kwargs)
    return str(caught.value)


def test_a_good_function_is_loaded(file: Path) -> None:
    file.write_text(GOOD)
    function = load_function(file, "compute_score", {"scale": 2.0})
    assert function(data_source="", solution_str="abc", ground_truth="", extra_info={}, scale=2.0) == 6.0


def test_a_function_with_kwargs_and_a_dataclass_in_its_file(file: Path) -> None:
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass P:\n    x: int = 1\ndef f(solution_str, **kwargs):\n    return P().x\n"
    )
    assert load_function(file, "f", {"a": 1})(solution_str="") == 1


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="custom_reward_function.path=.*nowhere.py: no such file"):
        load_function(tmp_path / "nowhere.py", "compute_score", {})


def test_a_file_that_is_not_python(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text(GOOD)
    with pytest.raises(ConfigError, match="is not a Python file"):
        load_function(tmp_path / "mine.txt", "compute_score", {})


def test_a_file_that_cannot_be_imported_shows_cause_and_line(file: Path) -> None:
    assert "ModuleNotFoundError: No module named 'not_there' (line 2: import not_there)" in message(
        file, "import json\nimport not_there\n"
    )
    assert "SyntaxError" in message(file, "x = 1\ndef f(:\n") and "line 2" in message(
        file, "x = 1\ndef f(:\n"
    )
    assert "SystemExit: 3 (line 1: raise SystemExit(3))" in message(file, "raise SystemExit(3)\n")


def test_a_missing_name_lists_what_is_there(file: Path) -> None:
    assert "custom_reward_function.name=reward" in message(file, GOOD, "reward")
    assert "defines no such function; it has compute_score" in message(file, GOOD, "reward")
    assert "is a int in" in message(file, "compute_score = 3\n")


def test_a_signature_that_does_not_accept_the_arguments(file: Path) -> None:
    assert "missing a required argument: 'answer'" in message(
        file, "def compute_score(answer, **kwargs):\n    return 0\n"
    )
    assert "got an unexpected keyword argument 'extra_info'" in message(
        file, "def compute_score(data_source, solution_str, ground_truth):\n    return 0\n"
    )
    assert "got an unexpected keyword argument 'bonus'" in message(file, GOOD, bonus=1)
    assert "are passed by the trainer" in message(file, GOOD, ground_truth=1)


def test_check_function_looks_at_the_users_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="custom_reward_function.path=.*no such file"):
        check_function(RewardConfig(CustomRewardConfig(path=str(tmp_path / "nowhere.py"))))


def test_check_sources_names_every_unknown_data_source(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_sources(RewardConfig(), ["b/other", "arithmetic", "a/other", "b/other"])
    assert [p.value for p in caught.value.problems] == ["a/other", "b/other"]
    check_sources(RewardConfig(), ["arithmetic", "openai/gsm8k"])
    file.write_text(GOOD)
    check_sources(RewardConfig(CustomRewardConfig(path=str(file))), ["a/other"])
