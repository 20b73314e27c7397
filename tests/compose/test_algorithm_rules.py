"""Rules across the keys of sampling, rewards, advantages and losses."""

import pytest
import yaml
from compose.legal import put, valid

from hydraflow.algorithms.config import (
    REJECTION_RULES,
    bounded_rules,
    listed_in,
)
from hydraflow.compose.rules import problems
from hydraflow.schema import PPOConfig

DEBUG, ROLLOUT = "trainer.debug", "actor_rollout_ref.rollout"


CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    "given",
    [
        {"rollout_is_threshold": "0.5_5.0"},
        {"rollout_is_threshold": "2"},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": 2},
        {"rollout_rs": "token_k1, seq_max_k2", "rollout_rs_threshold": "0.6_1.6, 2.5"},
        {"rollout_rs": ["seq_sum_k1", "seq_mean_k3"], "rollout_rs_threshold": ["0_1.6", 0.01]},
        {"rollout_rs": ["token_k1", "seq_mean_k3"], "rollout_rs_threshold": 1.5},
        {"rollout_rs": list(REJECTION_RULES), "rollout_rs_threshold": 2.0},
    ],
)
def test_rollout_corrections_as_in_verl_are_legal(given):
    config = valid()
    for key, value in given.items():
        put(config, f"{CORRECTION}.{key}", value)
    assert problems(config) == []
    rules = bounded_rules(config.algorithm.rollout_correction)
    assert [rule for rule, _ in rules] == listed_in(given.get("rollout_rs", []))


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        ({"rollout_is": "geometric"}, "rollout_is", "must be token or sequence"),
        (
            {"rollout_is_threshold": "5_0.5"},
            "rollout_is_threshold",
            "must be a number above 0, or two bounds",
        ),
        ({"rollout_is_threshold": 0}, "rollout_is_threshold", "must be a number above 0"),
        ({"rollout_is_threshold": True}, "rollout_is_threshold", "must be a number above 0"),
        ({"rollout_is_threshold": "1_2_3"}, "rollout_is_threshold", "must be a number above 0"),
        ({"rollout_is_threshold": "nan"}, "rollout_is_threshold", "must be a number above 0"),
        ({"rollout_is_threshold": 0.55}, "rollout_is_threshold", "two bounds need decimal points"),
        ({"rollout_is_threshold": "1.5_2.0"}, "rollout_is_threshold", "weight of equal probabilities at 1"),
        ({"rollout_rs": "seq_max_k1"}, "rollout_rs", "must list rules, each once: token_k1"),
        ({"rollout_rs": "token_k1,token_k1"}, "rollout_rs", "must list rules, each once: token_k1"),
        ({"rollout_rs": []}, "rollout_rs", "must list rules, each once: token_k1"),
        (
            {"rollout_rs": "token_k1"},
            "rollout_rs_threshold",
            "must be given: rollout_rs=token_k1 rejects by it",
        ),
        (
            {"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "2,2,2"},
            "rollout_rs_threshold",
            "has 3 thresholds; rollout_rs has 2 rules",
        ),
        (
            {"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5},
            "rollout_rs_threshold",
            "token_k1 takes two bounds such as 0.5_2.0, or one number above 1",
        ),
        (
            {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.2_0.5"},
            "rollout_rs_threshold",
            "the bounds of token_k1 must contain 1",
        ),
        (
            {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": "0.5_2.0"},
            "rollout_rs_threshold",
            "seq_max_k2 takes no lower bound",
        ),
        (
            {"rollout_rs": "token_k1", "rollout_rs_threshold": "2;3"},
            "rollout_rs_threshold",
            "must list numbers above 0, or pairs of bounds such as 0.5_2.0",
        ),
        ({"loss_type": "reinforced"}, "loss_type", "must be ppo_clip or reinforce"),
    ],
)
def test_rollout_corrections_that_make_no_sense(given, field, said):
    config = valid()
    for key, value in given.items():
        put(config, f"{CORRECTION}.{key}", value)
    [problem] = problems(config)
    assert problem.field == f"{CORRECTION}.{field}" and said in problem.rule
    key, _, value = problem.remedy.removeprefix("leave out ").strip("'").partition("=")
    assert key == problem.field
    put(config, key, yaml.safe_load(value))  # null is the default of those that are left out
    assert [other.field for other in problems(config)] in ([], [f"{CORRECTION}.rollout_rs_threshold"])


@pytest.mark.parametrize(
    ("estimator", "given", "field", "remedy"),
    [
        ("gdpo", {}, "algorithm.gdpo_reward_keys", "[score,format]"),
        ("gdpo", {"gdpo_reward_keys": ["a", "a"]}, "algorithm.gdpo_reward_keys", "[score,format]"),
        (
            "gdpo",
            {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0]},
            "algorithm.gdpo_reward_weights",
            "[1.0,1.0]",
        ),
        (
            "gdpo",
            {"gdpo_reward_keys": ["a"], "use_kl_in_reward": True},
            "algorithm.use_kl_in_reward",
            "use_kl_loss=true",
        ),
    ],
)
def test_what_an_estimator_needs_is_given(
    estimator: str, given: dict[str, object], field: str, remedy: str
) -> None:
    config = PPOConfig()
    config.recipe.name, config.algorithm.adv_estimator = "arithmetic", estimator
    for name, value in given.items():
        setattr(config.algorithm, name, value)
    [problem] = problems(config)
    assert problem.field == field and remedy in problem.remedy


def test_a_penalty_starts_within_the_longest_response() -> None:
    config = PPOConfig()
    config.recipe.name, config.data.max_response_length = "arithmetic", 100
    buffer = config.reward.reward_kwargs.overlong_buffer_cfg
    buffer.len = 101
    assert list(problems(config)) == []
    buffer.enable = True
    [problem] = problems(config)
    assert problem.remedy.endswith("len=100") and "data.max_response_length=100" in problem.rule
    config.reward.reward_kwargs.max_resp_len = 80
    assert "max_resp_len=80" in problems(config)[0].rule


def test_a_greedy_baseline_is_compared_with_scores_as_they_are() -> None:
    config = PPOConfig()
    config.recipe.name, config.algorithm.adv_estimator = "arithmetic", "remax"
    config.algorithm.norm_std_type = "batch"
    [problem] = problems(config)
    assert problem.remedy == "algorithm.norm_std_type=null"


@pytest.mark.parametrize(("kind", "refused"), [("group", True), ("batch", True), (None, False)])
def test_a_mean_that_divides_is_not_subtracted_before(kind: str | None, refused: bool) -> None:
    config = PPOConfig()
    config.recipe.name, config.algorithm.adv_estimator = "arithmetic", "maxrl"
    config.algorithm.norm_mean_type = kind
    assert [problem.field for problem in problems(config)] == ["algorithm.norm_mean_type"] * refused


@pytest.mark.parametrize(("horizon", "remedy"), [(102, "1030"), (103, None)])
def test_the_kl_coefficient_keeps_its_sign(horizon: int, remedy: str | None) -> None:
    """512 trajectories, of which one moves it by at most 0.2 / horizon."""
    config = PPOConfig()
    config.recipe.name, config.algorithm.kl_ctrl.type = "arithmetic", "adaptive"
    config.data.train_batch_size, config.actor_rollout_ref.rollout.n = 64, 8
    config.algorithm.kl_ctrl.horizon = horizon
    assert list(problems(config)) == [], "without a penalty in the reward nothing is steered"
    config.algorithm.use_kl_in_reward = True
    expected = [] if remedy is None else [f"algorithm.kl_ctrl.horizon={remedy}"]
    assert [problem.remedy for problem in problems(config)] == expected


def test_a_baseline_of_the_actors_probabilities_takes_no_bypass() -> None:
    config = PPOConfig()
    config.recipe.name, config.algorithm.adv_estimator = "arithmetic", "optimal_token_baseline"
    config.algorithm.rollout_correction.bypass_mode = True
    [problem] = problems(config)
    assert problem.field == "algorithm.rollout_correction.bypass_mode" and "own probabilities" in problem.rule
