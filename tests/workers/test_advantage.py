"""The advantage worker in this process, on four trajectories whose numbers can be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from known_columns import assert_as_documented
from workers.by_hand import process

from hydraflow.algorithms.config import (
    ESTIMATORS,
    AlgorithmConfig,
    KLControlConfig,
)
from hydraflow.algorithms.distillation.config import DistillationLossConfig
from hydraflow.algorithms.distillation.terms import Distillation
from hydraflow.algorithms.shaping import OverlongBuffer
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.fields import FINISH_REASONS
from hydraflow.workers.advantage import AdvantageSpec, AdvantageWorker, on_last_trained_token

MASK = [[1, 0, 1], [1], [1, 1], [1, 1]]
"""Two prompts with two trajectories each; the second token of the first one is a tool's answer."""
GAP = [[0.2, 9.0, 0.4], [0.1], [0.0, 0.2], [-0.2, 0.0]]
"""Log-probability less that of the reference."""


def column(rows: list[list[float]]) -> torch.Tensor:
    return ragged.from_rows([torch.tensor(row, dtype=torch.float32) for row in rows])


def make_batch(scores: list[float]) -> tuple[DataProto, DataProto]:
    """A batch and its scores. Prompts of 1, 1, 2 and 2 tokens."""
    batch = DataProto.from_dict(
        {
            "prompts": ragged.from_rows([torch.ones(n, dtype=torch.int64) for n in (1, 1, 2, 2)]),
            "response_mask": ragged.from_rows([torch.tensor(mask) for mask in MASK]),
            "old_log_probs": column([[-1.0] * len(mask) for mask in MASK]),
            "ref_log_prob": column([[-1.0 - gap for gap in row] for row in GAP]),
            "group": torch.tensor([7, 7, 3, 3]),
            "sample": torch.tensor([0, 1, 0, 1]),
            "finish_reason": torch.tensor([1, 0, 0, 0], dtype=torch.int8),
        }
    )
    scored = {"score": torch.tensor(scores, dtype=torch.float32), "failed": torch.zeros(4, dtype=torch.bool)}
    return batch, DataProto.from_dict(scored)


def make_worker(**options: object) -> AdvantageWorker:
    algorithm = AlgorithmConfig(**{"adv_estimator": "grpo"} | options)  # type: ignore[arg-type]
    return AdvantageWorker(process(), AdvantageSpec(algorithm, response_tokens=3))


def listed(batch: DataProto, name: str) -> list[float]:
    return ragged.parts(batch.get(name))[0].tolist()


def test_grpo_and_its_metrics() -> None:
    """Group 7 scores 1 and 0: mean 1/2, standard deviation sqrt(1/2). Group 3 scores 1 and 1: nothing to
    learn."""
    made = make_worker().compute(*make_batch([1, 0, 1, 1]))
    assert_as_documented(made)
    high = 0.5**0.5
    assert listed(made, "advantages") == pytest.approx([high, 0, high, -high, 0, 0, 0, 0], abs=2e-6)
    assert listed(made, "returns") == listed(made, "advantages")
    assert listed(made, "token_level_rewards") == [0, 0, 1, 0, 0, 1, 0, 1]
    metrics = made.meta_info["metrics"]
    assert metrics == pytest.approx(
        {
            **{f"critic/{name}/mean": 0.75 for name in ("score", "rewards")},
            **{f"critic/{name}/max": 1 for name in ("score", "rewards")},
            **{f"critic/{name}/min": 0 for name in ("score", "rewards")},
            **{
                f"critic/{name}/mean": high / 7 for name in ("advantages", "returns")
            },  # two of +high and one of -high, 7 trained tokens
            **{f"critic/{name}/max": high for name in ("advantages", "returns")},
            **{f"critic/{name}/min": -high for name in ("advantages", "returns")},
            "critic/groups/no_signal_ratio": 0.5,
            "response_length/mean": 2,
            "response_length/max": 3,
            "response_length/min": 1,
            "response_length/clip_ratio": 0.25,
            "prompt_length/mean": 1.5,
            "prompt_length/max": 2,
            "prompt_length/min": 1,
            "rollout/truncated_rows": 1,
            "rollout/faulted_rows": 0,
            "reward/failed_rows": 0,
        },
        abs=2e-6,
    )


@pytest.mark.parametrize(
    ("scores", "share"), [([1, 0, 0, 1], 0.0), ([0, 0, 1, 1], 1.0), ([0.1, 0.1, 0.3, 0.1], 0.5)]
)
def test_the_share_of_groups_without_signal(scores: list[float], share: float) -> None:
    metrics = make_worker().compute(*make_batch(scores)).meta_info["metrics"]
    assert metrics["critic/groups/no_signal_ratio"] == share


@pytest.mark.parametrize(
    ("groups", "estimator", "share"),
    [([0, 0, 1, 2], "grpo", 0.0), ([0, 1, 2, 2], "grpo", 1.0), ([0, 1, 2, 3], "grpo", None)]
    + [([0, 0, 1, 1], "reinforce_plus_plus", None)],
)
def test_only_groups_of_several_rows_count(groups: list[int], estimator: str, share: float | None) -> None:
    batch, scored = make_batch([1, 0, 1, 1])
    columns = {name: batch.get(name) for name in batch.keys()} | {"group": torch.tensor(groups)}
    worker = make_worker(adv_estimator=estimator)
    metrics = worker.compute(DataProto.from_dict(columns), scored).meta_info["metrics"]
    assert metrics.get("critic/groups/no_signal_ratio") == share


def test_where_no_function_says_what_is_right_the_score_does() -> None:
    """A short response has a reward for its length only if it is right."""
    batch, scored = make_batch([0, 1, 4, 1])
    without = DataProto.from_dict(dict(scored.items()) | {"acc": torch.full((4,), torch.nan)})
    worker = make_worker(length_penalty=1.0, norm_adv_by_std_in_grpo=False)
    made = [worker.compute(batch, one) for one in (scored, without)]
    assert listed(made[0], "token_level_rewards") == listed(made[1], "token_level_rewards")
    assert listed(made[1], "token_level_rewards") == [0, 0, -0.5, 1.5, 0, 4, 0, 1]


def test_advantages_without_the_division() -> None:
    made = make_worker(norm_adv_by_std_in_grpo=False).compute(*make_batch([1, 0, 4, 1]))
    assert listed(made, "advantages") == [0.5, 0, 0.5, -0.5, 1.5, 1.5, -1.5, -1.5]


@pytest.mark.parametrize("use_task_rewards", [True, False])
def test_a_teachers_estimates_beside_the_rewards_or_alone(use_task_rewards: bool) -> None:
    """Its log-probabilities are those of the reference; twice the gap comes off each trained token."""
    config = DistillationLossConfig("k1", distillation_loss_coef=2.0, use_task_rewards=use_task_rewards)
    algorithm = AlgorithmConfig(adv_estimator="grpo", norm_adv_by_std_in_grpo=False)
    spec = AdvantageSpec(algorithm, response_tokens=3, distillation=Distillation(config))
    batch, scored = make_batch([1, 0, 4, 1])
    made = AdvantageWorker(process(), spec).compute(batch.rename("ref_log_prob", "teacher_log_probs"), scored)
    task = [0.5, 0, 0.5, -0.5, 1.5, 1.5, -1.5, -1.5]
    gaps = [0.2, 0, 0.4, 0.1, 0.0, 0.2, -0.2, 0.0]
    expected = [use_task_rewards * one - 2 * gap for one, gap in zip(task, gaps, strict=True)]
    assert listed(made, "advantages") == pytest.approx(expected, abs=1e-6)


def test_kl_in_the_reward_and_its_controller() -> None:
    """Half of each trained token's KL comes off. Means of the rows: 0.3, 0.1, 0.1, -0.1, so the step's KL is
    0.1."""
    control = KLControlConfig(type="adaptive", kl_coef=0.5, target_kl=0.05, horizon=8)
    worker = make_worker(
        use_kl_in_reward=True, kl_penalty="kl", kl_ctrl=control, norm_adv_by_std_in_grpo=False
    )
    made = worker.compute(*make_batch([1, 0, 1, 1]))
    assert listed(made, "token_level_rewards") == pytest.approx(
        [-0.1, 0, 0.8, -0.05, 0, 0.9, 0.1, 1], abs=1e-6
    )
    # sums of the rows: 0.7 and -0.05, 0.9 and 1.1
    assert listed(made, "advantages") == pytest.approx(
        [0.375, 0, 0.375, -0.375, -0.1, -0.1, 0.1, 0.1], abs=1e-6
    )
    metrics = made.meta_info["metrics"]
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.1, abs=1e-6)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5
    assert metrics["critic/score/mean"] == 0.75
    assert metrics["critic/rewards/mean"] == pytest.approx((0.7 - 0.05 + 0.9 + 1.1) / 4, abs=1e-6)
    # twice the target: 1 + 0.2 * 4 trajectories / horizon 8
    assert worker.compute(*make_batch([1, 0, 1, 1])).meta_info["metrics"][
        "actor/reward_kl_penalty_coeff"
    ] == pytest.approx(0.55)


def test_the_distance_to_the_generator_counts_trained_tokens() -> None:
    probabilities = {"old_log_probs": [[0.5, 0.9], [0.2]], "rollout_log_probs": [[0.25, 0.1], [0.2]]}
    columns = {
        name: column([torch.tensor(row).log().tolist() for row in rows])
        for name, rows in probabilities.items()
    }
    columns |= {"entropys": column([[1.0, 8.0], [2.0]]), "replica": torch.tensor([0, 3], dtype=torch.int32)}
    mask = ragged.from_rows([torch.tensor([1, 0]), torch.tensor([1])])
    found = make_worker().compare_with_rollout(DataProto.from_dict({**columns, "response_mask": mask}))
    assert found.metrics["training/rollout_probs_diff_max"] == pytest.approx(0.25)
    assert found.metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.125)
    assert found.metrics["actor/entropy"] == 1.5
    assert found.by_replica == {0: pytest.approx(0.25), 3: 0.0}
    for what in ("mean", "max"):
        assert found.of_replicas[f"training/rollout_probs_diff_{what}/replica-0"] == pytest.approx(0.25)
        assert found.of_replicas[f"training/rollout_probs_diff_{what}/replica-3"] == 0.0


def test_nothing_is_compared_where_no_token_is_trained() -> None:
    names = ("old_log_probs", "rollout_log_probs", "entropys")
    columns = {name: column([[-1.0, -2.0]]) for name in names}
    columns |= {"replica": torch.tensor([0]), "response_mask": ragged.from_rows([torch.tensor([0, 0])])}
    found = make_worker().compare_with_rollout(DataProto.from_dict(columns))
    assert (found.metrics, found.of_replicas, found.by_replica) == ({}, {}, {})


@given(
    st.lists(st.lists(st.booleans(), min_size=0, max_size=5), min_size=1, max_size=6),
    st.sampled_from(sorted(ESTIMATORS)),
)
@settings(max_examples=100)
def test_every_estimator_sees_the_score_whatever_the_mask(masks: list[list[bool]], estimator: str) -> None:
    """The reference has the trained tokens alone: holes and masked ends are cut out of its rows, so the score
    is on their last token in both."""
    if estimator == "optimal_token_baseline":  # it compares places in rows: no holes, only masked ends
        masks = [sorted(mask, reverse=True) for mask in masks]
    trained = [[True] * sum(mask) for mask in masks]
    scores = [float(i % 3) for i in range(len(masks))]
    found, expected = (advantages_of(rows, scores, estimator) for rows in (masks, trained))
    kept = [[value for value, on in zip(row, mask) if on] for row, mask in zip(found, masks)]
    assert [len(row) for row in found] == [len(mask) for mask in masks]
    assert kept == [pytest.approx(row, abs=1e-6) for row in expected]
    assert all(value == 0 for row, mask in zip(found, masks) for value, on in zip(row, mask) if not on)


@given(st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=8))
@settings(max_examples=100)
def test_the_score_is_on_the_last_trained_token(masks: list[list[bool]]) -> None:
    """In a row without one on the last token."""
    scores = [1.0 + row for row in range(len(masks))]
    expected = [[0.0] * len(mask) for mask in masks]
    for row, mask in enumerate(masks):
        if mask:
            last = max((place for place, on in enumerate(mask) if on), default=len(mask) - 1)
            expected[row][last] = scores[row]
    mask = torch.tensor([on for mask in masks for on in mask], dtype=torch.bool)
    lengths = torch.tensor([len(mask) for mask in masks])
    found = on_last_trained_token(torch.tensor(scores), mask, lengths)
    assert [row.tolist() for row in found.split(lengths.tolist())] == expected


def advantages_of(masks: list[list[bool]], scores: list[float], estimator: str) -> list[list[float]]:
    """One group of rows with these masks, whose critic says 0.1 per token that is still to come."""
    values = [[0.1 * sum(mask[place:]) for place in range(len(mask))] for mask in masks]
    batch = DataProto.from_dict(
        {
            "prompts": ragged.from_rows([torch.ones(1, dtype=torch.int64) for _ in masks]),
            "response_mask": ragged.from_rows([torch.tensor(mask, dtype=torch.int64) for mask in masks]),
            "values": column(values),
            "old_log_probs": column([[-0.5] * len(mask) for mask in masks]),
            "sum_pi_squared": column([[0.6] * len(mask) for mask in masks]),
            "group": torch.zeros(len(masks), dtype=torch.int64),
            "sample": torch.arange(len(masks)),
            "finish_reason": torch.zeros(len(masks), dtype=torch.int8),
        }
    )
    scored = {
        "score": torch.tensor(scores),
        "failed": torch.zeros(len(masks), dtype=torch.bool),
        "reward_baselines": torch.full((len(masks),), 0.5),
        "reward_parts": torch.tensor([[score, score**2] for score in scores]),
    }
    worker = make_worker(adv_estimator=estimator, gamma=0.9, lam=0.8, gdpo_reward_keys=["a", "b"])
    made = worker.compute(batch, DataProto.from_dict(scored))
    return [row.tolist() for row in ragged.rows(made.get("advantages"))]


def failing(scores: list[float], failed: list[int], faulted: list[int]) -> tuple[DataProto, DataProto]:
    """The batch, with rows that the reward function failed on and rows that ended by a fault."""
    batch, scored = make_batch(scores)
    batch.get("finish_reason")[faulted] = FINISH_REASONS.index("fault")
    scored.get("failed")[failed] = True
    return batch, scored


def test_a_failed_row_is_not_compared_with_its_group() -> None:
    """Of a group of four, one failed and one ended by a fault: the others are compared with each other."""
    batch, scored = failing([1, -9, 2, 5], [1], [3])
    batch = batch.union(DataProto())
    batch.get("group")[:] = 7
    batch.get("sample")[:] = torch.arange(4)
    made = make_worker(norm_adv_by_std_in_grpo=False).compute(batch, scored)
    assert made.meta_info["left_out"] == [1, 3]
    # rows 0 and 2; the middle token of row 0 is masked
    assert listed(made, "advantages") == [-0.5, 0, -0.5, 0.5, 0.5]
    metrics = made.meta_info["metrics"]
    assert metrics["critic/score/mean"] == 1.5
    assert metrics["rollout/truncated_rows"] == metrics["rollout/faulted_rows"] == 1
    assert metrics["reward/failed_rows"] == 1


@pytest.mark.parametrize(
    ("estimator", "left_out"), [("grpo", [0, 1]), ("rloo", [0, 1]), ("reinforce_plus_plus", [1])]
)
def test_the_last_row_of_a_group_has_nothing_to_be_compared_with(estimator: str, left_out: list[int]) -> None:
    """Its raw score would be the largest advantage of the step, because the reward function failed."""
    made = make_worker(adv_estimator=estimator).compute(*failing([99, -9, 2, 5], [1], []))
    assert made.meta_info["left_out"] == left_out


def test_a_group_that_was_sampled_once_keeps_its_score() -> None:
    batch, scored = make_batch([4, 1, 0, 3])
    batch.get("group")[:2] = torch.tensor([5, 7])
    made = make_worker(norm_adv_by_std_in_grpo=False).compute(batch, scored)
    assert made.meta_info["left_out"] == []
    assert [row.tolist()[0] for row in ragged.rows(made.get("advantages"))] == [4, 1, -1.5, 1.5]


def test_remax_and_a_baseline_that_is_no_number() -> None:
    batch, scored = make_batch([4, 1, 0, 3])
    baselines = DataProto.from_dict({"reward_baselines": torch.tensor([1.0, 1.0, float("nan"), 2.0])})
    made = make_worker(adv_estimator="remax").compute(batch, scored.union(baselines))
    assert made.meta_info["left_out"] == [2]
    assert listed(made, "advantages") == [3, 0, 3, 0, 1, 1]
    assert listed(made, "returns") == [4, 0, 4, 1, 3, 3]


def test_gdpo_compares_each_reward_on_its_own() -> None:
    """Group 7: the first reward says 1 to -1, the second -1/2 to 1/2. Group 3: only the second differs."""
    batch, scored = make_batch([9, 9, 9, 9])
    parts = torch.tensor([[3.0, 0.0], [1.0, 2.0], [5.0, 4.0], [5.0, 0.0]])
    given = {"gdpo_reward_keys": ["right", "format"], "gdpo_reward_weights": [1.0, 0.5]}
    worker = make_worker(adv_estimator="gdpo", norm_adv_by_std_in_grpo=False, **given)
    made = worker.compute(batch, scored.union(DataProto.from_dict({"reward_parts": parts})))
    raw = torch.tensor([0.5, 0.5, -0.5, 1, 1, -1, -1])  # of the trained tokens
    wanted = ((raw - raw.mean()) / raw.std()).tolist()
    found = listed(made, "advantages")
    assert found[:1] + found[2:] == pytest.approx(wanted, abs=1e-6) and found[1] == 0
    metrics = made.meta_info["metrics"]
    assert (metrics["gdpo/right/mean"], metrics["gdpo/format/max"], metrics["gdpo/format/min"]) == (3.5, 4, 0)


def test_a_penalty_for_long_responses_is_no_part_of_the_score() -> None:
    """Responses of 3, 1, 2 and 2 tokens; the longest should be 3."""
    worker = make_worker(norm_adv_by_std_in_grpo=False)
    worker.spec = replace(worker.spec, overlong=OverlongBuffer(limit=3, size=2, factor=0.5, log=True))
    made = worker.compute(*make_batch([1, 1, 1, 0]))
    assert listed(made, "token_level_rewards") == [0, 0, 0.5, 1, 0, 0.75, 0, -0.25]
    assert listed(made, "advantages") == [-0.25, 0, -0.25, 0.25, 0.5, 0.5, -0.5, -0.5]
    metrics = made.meta_info["metrics"]
    assert metrics["critic/score/mean"] == 0.75 and metrics["critic/rewards/mean"] == 0.5
    assert (metrics["critic/overlong"], metrics["critic/overlong_reward/min"]) == (0.75, -0.5)


def test_a_score_that_is_no_number_is_a_failure() -> None:
    worker = make_worker()
    worker.spec = replace(worker.spec, drop_failed=False)
    made = worker.compute(*make_batch([1, float("nan"), 2, 5]))
    assert 1 in made.meta_info["left_out"]
    assert made.meta_info["metrics"]["reward/failed_rows"] == 1
    assert all(map(math.isfinite, listed(made, "advantages")))


def test_rows_that_need_no_reward_function_are_kept_where_it_fails() -> None:
    worker = make_worker()
    worker.spec = replace(worker.spec, needs_function=False)
    made = worker.compute(*failing([1, 0, 2, 5], [0, 1, 3], []))
    assert (made.meta_info["left_out"], made.meta_info["unscored"]) == ([], 0)
    assert made.meta_info["metrics"]["reward/failed_rows"] == 3
    batch, scored = failing([1, 0, 2, float("nan")], [0], [])
    made = worker.compute(batch, scored)
    assert (made.meta_info["left_out"], made.meta_info["unscored"]) == ([2, 3], 1), "a score is missing"


@pytest.mark.parametrize(("estimator", "half"), [("grpo", 0.5), ("rloo", 1.0)])
def test_a_sample_of_several_rows_counts_once_in_its_group(estimator: str, half: float) -> None:
    """One sample of three rows scores 1, the other, of one row, 0. The order of the rows is of no account."""
    batch, scored = make_batch([1, 0, 1, 1])
    batch.get("group")[:] = 7
    batch.get("sample")[:] = torch.tensor([0, 1, 0, 0])
    options = {"norm_adv_by_std_in_grpo": False} if estimator == "grpo" else {}
    made = make_worker(adv_estimator=estimator, **options).compute(batch, scored)
    first = [row.tolist()[0] for row in ragged.rows(made.get("advantages"))]
    assert first == [half, -half, half, half]


def test_a_failed_row_may_be_scored_and_a_faulted_one_never() -> None:
    worker = make_worker(norm_adv_by_std_in_grpo=False)
    worker.spec = replace(worker.spec, drop_failed=False)
    made = worker.compute(*failing([1, 0, 2, 5], [1], [3]))
    assert made.meta_info["left_out"] == [2, 3], "a fault also leaves the other row of its group alone"
    assert listed(made, "advantages") == [0.5, 0, 0.5, -0.5]


def test_a_step_may_have_no_row_left() -> None:
    made = make_worker().compute(*failing([0, 0, 0, 0], [0, 1, 2, 3], []))
    assert (len(made), made.meta_info["left_out"]) == (0, [0, 1, 2, 3])
