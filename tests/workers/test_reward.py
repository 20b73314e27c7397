"""The reward worker in this process, with its pool: texts, scores, and rows that fail."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from known_columns import assert_as_documented
from workers.by_hand import process

from hydraflow.models.config import ModelConfig
from hydraflow.models.tiny import make_tokenizer
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.rewards.config import CustomRewardConfig, RewardConfig
from hydraflow.workers.reward import FUNCTION_MEANS, PARTS, WHY_FAILED, RewardSpec, RewardWorker

TOKEN = make_tokenizer().convert_tokens_to_ids
FUNCTION = '''
"""Half a point for each character, and whatever the row says for its accuracy."""

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "raise":
        raise KeyError("no such thing")
    return {"score": len(solution_str) / 2, "acc": extra_info["acc"]}
'''


@contextmanager
def worker(path: str, reward: RewardConfig) -> Iterator[RewardWorker]:
    made = RewardWorker(process(), RewardSpec(ModelConfig(path=path), reward))
    try:
        yield made
    finally:
        made.close()


def make_batch(texts: list[str], truths: list[str], **columns: Any) -> tuple[DataProto, DataProto]:
    """Row objects, and responses to the prompt 1+1= of one token per character; `.` stands for the end
    token."""
    ids = [
        torch.tensor([TOKEN("<|end|>" if c == "." else c) for c in text], dtype=torch.int64) for text in texts
    ]
    prompts = [torch.tensor([TOKEN(c) for c in "1+1="], dtype=torch.int64) for _ in texts]
    objects = {
        "data_source": ["arithmetic"] * len(texts),
        "reward_model": [{"ground_truth": truth} for truth in truths],
        "extra_info": columns.get("extra_info", [{}] * len(texts)),
    }
    sampled = {"prompts": ragged.from_rows(prompts), "responses": ragged.from_rows(ids)}
    return DataProto.from_dict({}, objects, {"texts": True}), DataProto.from_dict(sampled)


def test_scores_and_texts(tiny: str) -> None:
    with worker(tiny, RewardConfig()) as reward:
        scored = reward.score(*make_batch(["42.", "7", "41.", "012"], ["42", "7", "42", "012"]))
    assert_as_documented(scored)
    assert scored.get("score").tolist() == scored.get("acc").tolist() == [1, 1, 0, 1]
    assert list(scored.get("text")) == ["42", "7", "41", "012"]
    assert list(scored.get("prompt_text")) == ["1+1="] * 4
    assert scored.meta_info == {WHY_FAILED: None, FUNCTION_MEANS: {}}


def test_rows_that_fail_are_counted_and_cost_only_themselves(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    config = RewardConfig(CustomRewardConfig(path=str(tmp_path / "mine.py")), failure_score=-3.0)
    batch = make_batch(
        ["1.", "22.", "", "333"], ["", "raise", "", ""], extra_info=[{"acc": 1}, {}, {"acc": 0}, {"acc": 1}]
    )
    with worker(tiny, config) as reward:
        scored = reward.score(*batch)
    assert scored.get("score").tolist() == [0.5, -3, 0, 1.5]
    assert scored.get("acc").tolist() == [1, -3, 0, 1]
    assert scored.get("failed").tolist() == [False, True, False, False]
    assert "no such thing" in scored.meta_info[WHY_FAILED]


def test_rows_that_a_reward_model_scores(tiny: str) -> None:
    """They have no accuracy, which is not an accuracy of 0, and no part in the means of the functions."""
    batch, sampled = make_batch(["42.", "7", "42."], ["42", "7", "41"])
    batch.non_tensor_batch["data_source"][1] = "essays"
    spec = RewardSpec(
        ModelConfig(path=tiny), RewardConfig(functions=[{"name": "data_source"}]), optional=True
    )
    reward = RewardWorker(process(), spec)
    try:
        scored = reward.score(batch, sampled)
    finally:
        reward.close()
    assert scored.get("acc").tolist() == pytest.approx([1, math.nan, 0], nan_ok=True)
    assert not scored.get("failed").any()
    assert scored.meta_info[FUNCTION_MEANS] == {"reward/data_source": 0.5}


def test_greedy_responses_of_rows_that_may_go_without_a_score(tiny: str) -> None:
    """As their samples."""
    batch, sampled = make_batch(["42.", "7"], ["42", "7"])
    batch.non_tensor_batch["data_source"][:] = "essays"
    batch = batch.union(DataProto.from_dict({"group": torch.tensor([0, 0])}))
    reward = RewardWorker(process(), RewardSpec(ModelConfig(path=tiny), RewardConfig(), optional=True))
    try:
        scored = reward.score(batch, sampled, make_batch(["1"], [""])[1])
    finally:
        reward.close()
    assert not scored.get("failed").any() and scored.get("reward_baselines").tolist() == [0, 0]


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=str(tmp_path)):
        RewardWorker(process(), RewardSpec(ModelConfig(path=str(tmp_path)), RewardConfig()))


def test_greedy_responses_are_baselines(tiny: str) -> None:
    """Two samples of each prompt; a greedy response that fails takes its group with it."""
    batch, sampled = make_batch(["42.", "7", "1", "012"], ["42", "42", "12", "12"])
    batch = batch.union(DataProto.from_dict({"group": torch.tensor([0, 0, 1, 1])}))
    _, greedy = make_batch(["42.", "5"], ["", ""])
    with worker(tiny, RewardConfig()) as reward:
        scored = reward.score(batch, sampled, greedy)
    assert_as_documented(scored)
    assert scored.get("score").tolist() == [1, 0, 0, 0]
    assert scored.get("reward_baselines").tolist() == [1, 1, 0, 0]
    assert not scored.get("failed").any()


def test_a_greedy_response_that_fails(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION.replace('ground_truth == "raise"', 'solution_str == "5"'))
    config = RewardConfig(CustomRewardConfig(path=str(tmp_path / "mine.py")), failure_score=-3.0)
    batch, sampled = make_batch(["42", "7", "1"], ["", "", ""], extra_info=[{"acc": 0}] * 3)
    batch = batch.union(DataProto.from_dict({"group": torch.tensor([0, 1, 1])}))
    with worker(tiny, config) as reward:
        scored = reward.score(batch, sampled, make_batch(["5", "333"], ["", ""])[1])
    assert scored.get("score").tolist() == [1, 0.5, 0.5]
    assert scored.get("reward_baselines").tolist() == [-3, 1.5, 1.5]
    assert scored.get("failed").tolist() == [True, False, False]
    assert "no such thing" in scored.meta_info[WHY_FAILED]


def test_several_rewards_of_one_function(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION.replace('"acc": extra_info["acc"]', "**extra_info"))
    config = RewardConfig(CustomRewardConfig(path=str(tmp_path / "mine.py")), failure_score=-3.0)
    batch, sampled = make_batch(
        ["42", "7"], ["", ""], extra_info=[{"form": 0.25, "length": 2}, {"length": 1}]
    )
    batch.meta_info[PARTS] = ("form", "score")
    with worker(tiny, config) as reward:
        scored = reward.score(batch, sampled)
    assert_as_documented(scored)
    assert scored.get("reward_parts").tolist() == [[0.25, 1.0], [-3.0, -3.0]]
    assert scored.get("failed").tolist() == [False, True]
    assert "returned no number form" in scored.meta_info[WHY_FAILED]
