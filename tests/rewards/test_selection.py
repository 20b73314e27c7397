"""Several functions for one score: what may be written, and what comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from source_tree import ROOT

from hydraflow.errors import ConfigError
from hydraflow.rewards.config import CustomRewardConfig, JudgeConfig, RewardConfig, RewardManagerConfig
from hydraflow.rewards.pool import RewardPool, RewardRow, check_function
from hydraflow.rewards.selection import check_sources, problems

MINE = """
def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    if solution_str == "none":
        return None
    return {"score": len(solution_str) + bonus, "acc": 0.25, "pred": solution_str}

async def later(data_source, solution_str, ground_truth, extra_info):
    return 3.0
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


def scored(functions: list[Any], *rows: RewardRow, workers: int = 1) -> list[Any]:
    with RewardPool(RewardConfig(functions=functions, num_workers=workers)) as pool:
        pool.require_loaded()
        return pool.score(rows)


@pytest.mark.parametrize("workers", [0, 1])
def test_scores_are_added_by_weight_and_each_keeps_its_number(mine: str, workers: int) -> None:
    functions = [
        {"name": "exact"},
        {"name": "length", "weight": 0.5, "kwargs": {"most": 2, "buffer": 4}},
        {"path": mine, "weight": 0.1, "kwargs": {"bonus": 1}},
    ]
    right, none = scored(
        functions, RewardRow("any", "0042", "0042", {}), RewardRow("any", "none", "0042", {}), workers=workers
    )
    assert right.score == pytest.approx(1.0 + 0.5 * -0.5 + 0.1 * 5.0)
    assert right.extra == {
        "exact": 1.0,
        "length": -0.5,
        "mine": 5.0,
        "mine/acc": 0.25,
        "acc": 0.25,  # of the first function that gives one
    }
    assert none.failed == "ValueError: mine returned a NoneType, not a number"


def test_one_asynchronous_function_makes_all_of_them_so(mine: str) -> None:
    (result,) = scored(
        [{"name": "exact", "weight": 2}, {"path": mine, "name": "later"}], RewardRow("any", "1", "1", {})
    )
    assert (result.score, result.extra) == (5.0, {"exact": 1.0, "later": 3.0, "acc": 1.0})


def test_the_data_sources_own_function_can_be_one_of_several() -> None:
    functions = [{"name": "data_source"}, {"name": "format", "weight": 0.5}]
    text = "<think>6 * 7</think>\n<answer>#### 42</answer>"
    (result,) = scored(functions, RewardRow("openai/gsm8k", text, "42", {}))
    assert result.score == 1.5
    assert result.extra["data_source/acc_flexible"] == result.extra["acc"] == 1.0


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        (["math"], "reward.functions[0]=math: must be a mapping"),
        ([{"name": "maths"}], "reward.functions[0].name=maths: must be data_source, exact, gsm8k"),
        ([{"name": ["math"]}], "reward.functions[0].name=[math]: must be the name of a function"),
        ([{"path": "mine.py", "name": 7}], "reward.functions[0].name=7: must be the name of a function"),
        ([{"name": "math", "wieght": 2}], "reward.functions[0].wieght=2: only name, path, weight or kwargs"),
        ([{"name": "math", "weight": "2"}], "reward.functions[0].weight=2: must be a finite number"),
        ([{"name": "math", "kwargs": [1]}], "reward.functions[0].kwargs=[1]: must be a mapping"),
        ([{"path": "mine.py", "kwargs": {1: 2}}], "reward.functions[0].kwargs={1: 2}: must be a mapping"),
        ([{"name": "math"}, {"name": "math"}], "reward.functions=[math,math]: two functions are called math"),
        ([{"path": "score.py"}], "reward.functions=[score]: score is reserved for another number"),
        (
            [{"name": "format", "kwargs": {"most": 1}}],
            "kwargs={most: 1}: format has no argument most; it takes pattern",
        ),
        ([{"path": "nowhere.py"}], "nowhere.py: no such file"),
        ([{"name": "judge"}], "reward.judge.base_url=null: must be given for the judge"),
    ],
)
def test_what_is_wrong_is_reported_before_the_start(functions: list[Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_function(RewardConfig(functions=functions))
    assert expected in str(caught.value)
    check_sources(RewardConfig(functions=[{"name": "exact"}]), ["any source"])


def test_functions_and_managers_that_exclude_each_other(mine: str) -> None:
    custom = CustomRewardConfig(path=mine)
    (both,) = problems(RewardConfig(functions=[{"name": "exact"}], custom_reward_function=custom))
    assert "reward.functions already selects the functions" in str(both)
    (batch,) = problems(RewardConfig(reward_manager=RewardManagerConfig("batch")))
    assert "calls a single custom function with many rows" in str(batch)


def test_the_example_on_the_page_scores_a_boxed_answer(mine: str) -> None:
    page = (ROOT / "docs/rewards.md").read_text(encoding="utf-8")
    functions = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])["reward"]["functions"]
    functions[2]["path"] = mine
    answers = (r"so \boxed{4}.", "so 4")
    boxed, bare = scored(functions, *(RewardRow("any", answer, "4", {}) for answer in answers))
    assert (boxed.extra["format"], bare.extra["format"]) == (1.0, 0.0)


def judge_problem(**values: Any) -> str:
    judge = JudgeConfig(**{"base_url": "http://host/v1", "model": "m"} | values)
    (problem,) = problems(RewardConfig(functions=[{"name": "judge"}], judge=judge))
    return str(problem)


def test_what_is_wrong_with_a_judge() -> None:
    scheme = "must begin with http:// or https://\n      -> reward.judge.base_url=http://host:8000/v1"
    assert scheme in judge_problem(base_url="host:8000/v1")
    assert "exceeds reward.timeout=10" in judge_problem(timeout=20.0)
    assert "reward.timeout=60" in judge_problem(timeout=20.0)
    assert "must have one group" in judge_problem(pattern="Score")
    assert "is not a regular expression" in judge_problem(pattern="(")
    assert "{answer} is unknown" in judge_problem(prompt="{answer}")
    assert "write {{ and }} for braces" in judge_problem(prompt="{")
