"""Advantage estimators: values computed by hand, and agreement with padded tables in float64 for all
inputs."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from algorithms.advantage_oracle import Step, f64, possible, reference, suited
from hypothesis import given, settings
from hypothesis import strategies as st

from hydraflow.algorithms.advantages import estimate_advantages
from hydraflow.algorithms.config import ESTIMATORS, AlgorithmConfig, Estimator
from hydraflow.algorithms.gae import gae
from hydraflow.algorithms.grpo import grpo
from hydraflow.algorithms.reinforce_plus_plus import discounted_return
from hydraflow.algorithms.rloo import rloo


def test_gae_by_hand():
    # delta_2 = 1 - 0.5 = 0.5; delta_1 = 0 + 0.5 * 0.5 - 0.25 = 0; A_1 = 0 + 0.5 * 0.5 * 0.5 = 0.125
    advantages, returns = gae(
        f64([0, 1, 0]),
        torch.tensor([1, 1, 0]),
        torch.tensor([3]),
        values=f64([0.25, 0.5, 9]),
        gamma=0.5,
        lam=0.5,
    )
    assert returns.tolist() == [0.375, 1.0, 0.0]
    assert advantages.tolist() == [0.125, 0.5, 0.0]


def test_gae_with_a_gamma_and_a_lambda_for_each_token():
    """Against a loop; the third token is an observation, and rows have lengths 4 and 3. The critic's may be
    numbers beside them."""
    draw = torch.Generator().manual_seed(0)
    rewards, values, gamma, lam = torch.rand(4, 7, generator=draw, dtype=torch.float64)
    mask, lengths = torch.tensor([1, 1, 0, 1, 1, 1, 1]), torch.tensor([4, 3])
    expected, returns = torch.zeros(2, 7, dtype=torch.float64)
    for row in ([0, 1, 3], [4, 5, 6]):
        ahead, after, of_critic = 0.0, 0.0, 0.0
        for t in reversed(row):
            delta = rewards[t] + gamma[t] * ahead - values[t]
            after = expected[t] = delta + gamma[t] * lam[t] * after
            of_critic = rewards[t] + 0.9 * ahead - values[t] + 0.9 * 0.5 * of_critic
            returns[t], ahead = of_critic + values[t], values[t]
    knobs = {"values": values, "gamma": gamma, "lam": lam}
    found = gae(rewards, mask, lengths, **knobs, critic_gamma=0.9, critic_lam=0.5)
    torch.testing.assert_close(found, (expected, returns), rtol=0, atol=1e-12)
    alone = gae(rewards, mask, lengths, **knobs)
    torch.testing.assert_close(alone, (expected, (expected + values) * mask), rtol=0, atol=1e-12)


def test_the_example_of_the_page_has_a_lambda_for_each_token():
    page = (Path(__file__).parents[2] / "docs" / "advantages.md").read_text()
    [source] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code: dict[str, Any] = {}
    exec(source, code)
    rewards, mask, lengths = f64([0, 1, 0, 0, 2]), torch.ones(5, dtype=torch.int64), torch.tensor([2, 3])
    values = f64([0.5, 0.25, 0.1, 0.2, 0.3])
    found = code["steady_at_first"](rewards, mask, lengths, values=values, gamma=0.9, lam=0.5)
    lam = f64([0.5 ** (place / 8) for place in (1, 2, 1, 2, 3)])
    wanted = gae(rewards, mask, lengths, values=values, gamma=torch.full_like(lam, 0.9), lam=lam)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_gae_steps_over_observations():
    knobs = {"gamma": 0.9, "lam": 0.8}
    packed = gae(f64([0, 2, 1]), torch.ones(3), torch.tensor([3]), values=f64([0.3, 0.6, 0.1]), **knobs)
    spread = gae(
        f64([0, 0, 2, 0, 1]),
        torch.tensor([1, 0, 1, 0, 1]),
        torch.tensor([5]),
        values=f64([0.3, 77, 0.6, float("nan"), 0.1]),
        **knobs,
    )
    for short, long in zip(packed, spread):
        assert long[[0, 2, 4]].tolist() == short.tolist()
        assert long[[1, 3]].tolist() == [0.0, 0.0]


def test_return_to_go_by_hand():
    """Two rows: 1, 0, 4 and a masked token; 3."""
    rewards, mask = f64([1, 0, 4, 0, 3]), torch.tensor([1, 1, 1, 0, 1])
    returns = discounted_return(rewards, mask, torch.tensor([4, 1]), gamma=0.5)[1]
    assert returns.tolist() == [2.0, 2.0, 4.0, 0.0, 3.0]


SCORES = f64([1, 3, 5, 8])
IDS = torch.tensor([5, 2, 5, 9])  # scores 1 and 5 are a group; 3 and 8 are alone


def test_grpo_by_hand():
    root = math.sqrt(8)  # unbiased standard deviation of 1 and 5
    advantages = grpo(SCORES, group_ids=IDS)
    assert torch.allclose(advantages, f64([-2 / root, 3, 2 / root, 8]), atol=1e-5)
    assert advantages.dtype == torch.float64


def test_dr_grpo_does_not_divide():
    assert grpo(SCORES, group_ids=IDS, norm_adv_by_std_in_grpo=False).tolist() == [-2, 3, 2, 8]


def test_grpo_gives_a_group_of_equal_scores_no_signal():
    ids = torch.zeros(8, dtype=torch.int64)
    assert grpo(torch.full((8,), 0.1), group_ids=ids).tolist() == [0.0] * 8


def test_rloo_by_hand():
    # 1 less its other 5, 5 less its other 1; alone: the score itself
    assert rloo(SCORES, group_ids=IDS).tolist() == [-4, 3, 4, 8]


def test_one_number_per_trajectory_goes_to_its_trained_tokens():
    """Rows of 2, 0, 3 and 1 tokens. Only the scores count: no reward of a token is read."""
    config, rewards = AlgorithmConfig(adv_estimator="rloo"), torch.full((6,), float("nan"))
    mask, lengths = torch.tensor([1, 1, 0, 1, 1, 1]), torch.tensor([2, 0, 3, 1])
    advantages, returns = estimate_advantages(config, SCORES, rewards, mask, lengths, group_ids=IDS)
    assert advantages.tolist() == returns.tolist() == [-4, -4, 0, 4, 4, 8]


def last_token_only(rewards, mask, lengths, *, group_ids, gamma):
    """What a user may write: the reward of a row's last token, less its group's number."""
    found = torch.zeros_like(rewards)
    last = lengths.cumsum(0) - 1
    found[last] = gamma * rewards[last] - group_ids
    return found, found


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (Estimator(f"{__name__}:last_token_only", reads=("gamma",), groups=True), [0.0, -4.5, -1.0]),
        (Estimator("torch:neg", per_trajectory=True), [-1.0, -1.0, -3.0]),
    ],
)
def test_a_new_estimator_is_a_function_and_a_line(monkeypatch, estimator, expected):
    monkeypatch.setitem(ESTIMATORS, "mine", estimator)
    config = AlgorithmConfig(adv_estimator="mine", gamma=0.5)
    scores, rewards, lengths = f64([1, 3]), f64([0, 1, 8]), torch.tensor([2, 1])
    ids = torch.tensor([5, 5])
    found = estimate_advantages(config, scores, rewards, torch.ones(3), lengths, group_ids=ids)
    assert [column.tolist() for column in found] == [expected] * 2


# --- against padded tables ---------------------------------------------------------------------------------


@st.composite
def steps(draw) -> Step:
    """Rows of 0 to 6 tokens with any mask, of few or many groups."""
    mask = draw(st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=6))
    number = st.floats(-5, 5, width=32)

    def like_mask(cell=number) -> list[list[float]]:
        return [draw(st.lists(cell, min_size=len(row), max_size=len(row))) for row in mask]

    def per_row(cell):
        return draw(st.lists(cell, min_size=len(mask), max_size=len(mask)))

    given_before = (
        per_row(number),
        per_row(st.integers(-1, 3)),
        like_mask(),
        like_mask(),
        mask,
        per_row(number),
        per_row(st.tuples(number, number).map(list)),
    )
    log_probs = like_mask(st.floats(-8, -0.125))
    return Step(*given_before, log_probs, possible(log_probs, like_mask(st.floats(0.125, 1))))


CONFIGS = st.builds(
    AlgorithmConfig,
    adv_estimator=st.sampled_from(sorted(ESTIMATORS)),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
    gdpo_reward_weights=st.just([1.0, 0.5]),
    norm_adv_by_std_in_grpo=st.booleans(),
)
DECOUPLED = st.builds(
    AlgorithmConfig,
    adv_estimator=st.just("gae"),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([1.0, 0.95]),
    critic_gamma=st.sampled_from([None, 1.0, 0.8]),
    critic_lam=st.sampled_from([None, 1.0, 0.5]),
    lam_length_alpha=st.sampled_from([None, 0.05, 0.5, 2.0]),
)
"""GAE whose returns are not those of its advantages."""


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(deadline=None, max_examples=20)
@given(CONFIGS, steps())
def test_every_estimator_agrees_with_padded_tables(name, config, step):
    assert_agrees(replace(config, adv_estimator=name), step)


@settings(deadline=None, max_examples=50)
@given(DECOUPLED, steps())
def test_decoupled_gae_agrees_with_padded_tables(config, step):
    assert_agrees(config, step)


def assert_agrees(config: AlgorithmConfig, step: Step) -> None:
    step = suited(config, step)
    for found, expected in zip(step.estimated(config), reference(config, step)):
        for row, wanted in zip(found, expected):
            assert row == pytest.approx(wanted[: len(row)].tolist(), rel=1e-6, abs=1e-7)


@settings(deadline=None, max_examples=200)
@given(CONFIGS, steps(), st.data())
def test_the_order_of_rows_is_that_of_the_results(config, step, data):
    step, order = suited(config, step), data.draw(st.permutations(range(len(step.scores))))
    for plain, moved in zip(step.estimated(config), step.rows(order).estimated(config)):
        assert moved == [pytest.approx(plain[row], rel=1e-6, abs=1e-7) for row in order]


@settings(deadline=None, max_examples=100)
@given(CONFIGS, steps())
def test_only_trained_tokens_count_and_all_others_get_zero(config, step):
    """A masked token's value and reward may be anything."""
    spoilt = [
        [[x if on else float("nan") for x, on in zip(*row)] for row in zip(rows, step.mask)]
        for rows in (step.rewards, step.values)
    ]
    found = replace(step, rewards=spoilt[0], values=spoilt[1]).estimated(config)
    assert found == step.estimated(config)
    for column in found:
        for row, mask in zip(column, step.mask):
            assert all(x == 0 for x, on in zip(row, mask) if not on)


@pytest.mark.parametrize("name", ["grpo", "gae", "remax"])
def test_advantages_may_be_whitened_and_clipped(name):
    step = replace(Step.of([4.0, 0.0, 1.0, 3.0], [0, 0, 1, 1]), baselines=[1.0] * 4)
    plain = AlgorithmConfig(adv_estimator=name, norm_adv_by_std_in_grpo=False)
    wanted, returns = step.estimated(plain)
    column = np.array(wanted)[:, 0]
    whiter = (column - column.mean()) / math.sqrt(column.var(ddof=1) + 1e-8)
    found = step.estimated(replace(plain, whiten_advantages=True, advantage_clip=0.75))
    assert np.array(found[0])[:, 0] == pytest.approx(whiter.clip(-0.75, 0.75), abs=1e-6)
    assert found[1] == (found[0] if name == "grpo" else returns)
    assert np.abs(whiter).max() > 0.75


COMPARING = [name for name, one in ESTIMATORS.items() if one.groups]


@pytest.mark.parametrize("name", [name for name in COMPARING if name != "asymre"])
@settings(deadline=None, max_examples=20)
@given(st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=2))
def test_groups_of_equal_scores_give_no_signal(name, scores):
    step = Step.of(scores * 3, [0, 1] * 3)
    for row in step.estimated(AlgorithmConfig(adv_estimator=name))[0]:
        assert row == pytest.approx([0.0], abs=1e-6 if ESTIMATORS[name].sum_pi_squared else 0)


def grouped(draw_scores: st.SearchStrategy[float]) -> st.SearchStrategy[Step]:
    """Two groups of three rows with one token each."""
    return st.lists(draw_scores, min_size=6, max_size=6).map(lambda scores: Step.of(scores, [0, 1] * 3))


@pytest.mark.parametrize(
    "name",
    [name for name in COMPARING if name not in ("gpg", "maxrl")],
)
@settings(deadline=None, max_examples=20)
@given(grouped(st.integers(-4, 4).map(float)), st.integers(-3, 3))
def test_a_shift_of_a_groups_scores_changes_nothing(name, step, shift):
    config = AlgorithmConfig(adv_estimator=name)
    moved = Step.of([score + shift * group for score, group in zip(step.scores, step.groups)], step.groups)
    for row, other in zip(step.estimated(config)[0], moved.estimated(config)[0]):
        assert row == pytest.approx(other, abs=1e-7)


@pytest.mark.parametrize(
    "name",
    ["grpo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "maxrl", "gdpo", "raft"],
)
@settings(deadline=None, max_examples=20)
@given(grouped(st.integers(0, 4).map(float)), st.sampled_from([0.5, 3.0]))
def test_the_scale_of_scores_changes_nothing(name, step, scale):
    """But for the 1e-6 beside the standard deviation."""
    config = AlgorithmConfig(adv_estimator=name)
    scaled = Step.of([scale * score for score in step.scores], step.groups)
    for row, other in zip(step.estimated(config)[0], scaled.estimated(config)[0]):
        assert row == pytest.approx(other, abs=1e-5)


@settings(deadline=None, max_examples=20)
@given(grouped(st.integers(-4, 4).map(float)))
def test_the_baseline_of_opmd_goes_from_the_best_score_to_the_mean(step):
    """As its temperature goes from nothing to everything."""
    mean = step.estimated(AlgorithmConfig(adv_estimator="grpo", norm_adv_by_std_in_grpo=False))[0]
    near_mean = step.estimated(AlgorithmConfig(adv_estimator="opmd", opmd_tau=1e6))[0]
    near_best = step.estimated(AlgorithmConfig(adv_estimator="opmd", opmd_tau=1e-3))[0]
    for row, (score, group) in enumerate(zip(step.scores, step.groups)):
        best = max(other for other, there in zip(step.scores, step.groups) if there == group)
        assert near_mean[row] == pytest.approx(mean[row], abs=1e-4)
        assert near_best[row] == pytest.approx([score - best], abs=0.01)


def test_asymre_pulls_towards_equal_scores_too():
    step = Step.of([2.0, 2.0, 1.0, 3.0], [0, 0, 1, 1])
    found = step.estimated(AlgorithmConfig(adv_estimator="asymre", asymre_baseline_shift=-0.5))[0]
    assert found == [[0.5], [0.5], [-0.5], [1.5]]


def test_several_rows_of_a_sample_count_once():
    """Scores 1 and 3 are two rows of one sample, 0 the other sample; OPO weighs them 3 tokens to 1."""
    scores, tokens = f64([1, 3, 0]), torch.ones(4, dtype=torch.int64)
    expected = {"rloo": [2, 2, 2, -2], "opo": [0.5, 0.5, 0.5, -1.5], "maxrl": [1, 1, 1, -1]}
    for name, advantages in expected.items():
        found, _ = estimate_advantages(
            AlgorithmConfig(adv_estimator=name),
            scores,
            tokens.double(),
            tokens,
            torch.tensor([1, 2, 1]),
            group_ids=torch.tensor([4, 4, 4]),
            samples=torch.tensor([0, 0, 1]),
        )
        assert found.tolist() == advantages


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_keeps_the_dtype(name):
    tokens = torch.tensor([0.0, 2.0, 1.0])
    found = estimate_advantages(
        AlgorithmConfig(adv_estimator=name),
        torch.tensor([2.0, 1.0]),
        tokens,
        torch.ones(3, dtype=torch.int64),
        torch.tensor([2, 1]),
        values=tokens,
        group_ids=torch.tensor([0, 0]),
        reward_baselines=torch.tensor([0.5, 0.5]),
        reward_parts=torch.tensor([[2.0], [1.0]]),
        old_log_probs=-tokens,
        sum_pi_squared=torch.full((3,), 0.5),
    )
    assert [column.dtype for column in found] == [torch.float32] * 2
    assert all(column.abs().sum() > 0 for column in found)


def test_optimal_token_baselines_by_hand():
    """Two rows of 1 and 2 tokens of probability 1/2 in a vocabulary of two: W is 1/2, then 1. The second
    token is alone: its own baseline, or none."""
    step = Step.of([3.0, 1.0], [0, 0])
    step = replace(step, rewards=[[3.0], [0.0, 1.0]], values=[[0.0], [0.0, 0.0]], mask=[[1], [1, 1]])
    step = replace(step, log_probs=[[math.log(0.5)], [math.log(0.5)] * 2], pi_squared=[[0.5], [0.5] * 2])
    for name, alone in (("optimal_token_baseline", 0.0), ("tir_optimal_token_baseline", 1.0)):
        found, returns = step.estimated(AlgorithmConfig(adv_estimator=name))
        assert returns == [[3.0], [1.0, 1.0]]
        assert found == [pytest.approx([1.0], abs=1e-6), pytest.approx([-1.0, alone], abs=1e-6)]


def test_near_certain_tokens_do_not_divide_by_noise():
    """In float32, 1 - 2p + sum of squares of tokens of probability 1 is noise around 0: an advantage stays
    the difference of two returns of at most 1."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(50):
        rare = 1e-7 * torch.rand(8, 4, generator=draw)
        right = torch.randint(0, 2, (8,), generator=draw).float()
        rewards = torch.zeros(8, 4)
        rewards[:, -1] = right
        found, _ = estimate_advantages(
            AlgorithmConfig(adv_estimator="optimal_token_baseline"),
            right,
            rewards.flatten(),
            torch.ones(32, dtype=torch.int64),
            torch.full((8,), 4),
            group_ids=torch.zeros(8, dtype=torch.int64),
            old_log_probs=torch.log1p(-rare).flatten(),
            sum_pi_squared=((1 - rare) ** 2 + rare**2).flatten(),
        )
        assert found.abs().max() <= 1.0 + 1e-5


@pytest.mark.parametrize("scores", [[-0.7, 0.1, 0.6], [-1.0, -1.0, 1.1, 0.9], [0.6, 0.6, -0.4, -0.4, -0.4]])
def test_a_mean_that_is_0_but_for_rounding_is_0(scores):
    step = Step.of(scores, [0] * len(scores))
    tokens = torch.ones(len(scores), dtype=torch.int64)
    found, _ = estimate_advantages(
        AlgorithmConfig(adv_estimator="maxrl"),
        torch.tensor(scores),
        torch.tensor(scores),
        tokens,
        tokens,
        group_ids=torch.tensor(step.groups),
    )
    assert found.tolist() == [0.0] * len(scores)


def test_only_gae_needs_a_critic():
    assert [name for name, estimator in ESTIMATORS.items() if estimator.critic] == ["gae"]
