"""Advantage estimators: values computed by hand, and agreement with padded tables in float64 for all
inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydraflow.algorithms.advantages import estimate_advantages
from hydraflow.algorithms.config import ESTIMATORS, AlgorithmConfig, Estimator
from hydraflow.algorithms.gae import gae
from hydraflow.algorithms.grpo import grpo
from hydraflow.algorithms.reinforce_plus_plus import reinforce_plus_plus
from hydraflow.algorithms.rloo import rloo


def f64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


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
    half = 1 / math.sqrt(2)
    assert advantages.tolist() == pytest.approx([-half, half, 0.0], abs=1e-6)


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
    returns = reinforce_plus_plus(rewards, mask, torch.tensor([4, 1]), gamma=0.5)[1]
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


@dataclass(frozen=True)
class Step:
    """The rows of a step, each with one score, one group and a list of tokens."""

    scores: list[float]
    groups: list[int]
    rewards: list[list[float]]
    values: list[list[float]]
    mask: list[list[int]]

    def rows(self, order: list[int]) -> Step:
        """These rows in that order."""
        return Step(*([column[row] for row in order] for column in vars(self).values()))

    def estimated(self, config: AlgorithmConfig) -> list[list[list[float]]]:
        """Advantages and returns, row by row, as the code computes them."""
        lengths = [len(row) for row in self.mask]
        rewards, values, mask = (
            f64([x for row in rows for x in row]) for rows in (self.rewards, self.values, self.mask)
        )
        found = estimate_advantages(
            config,
            f64(self.scores),
            rewards,
            mask,
            torch.tensor(lengths),
            values=values,
            group_ids=torch.tensor(self.groups),
        )
        assert all(column.dtype == torch.float64 for column in found)
        return [[row.tolist() for row in column.split(lengths)] for column in found]


@st.composite
def steps(draw) -> Step:
    """Rows of 0 to 6 tokens with any mask, of few or many groups."""
    mask = draw(st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=6))
    number = st.floats(-5, 5, width=32)

    def like_mask() -> list[list[float]]:
        return [draw(st.lists(number, min_size=len(row), max_size=len(row))) for row in mask]

    def per_row(cell):
        return draw(st.lists(cell, min_size=len(mask), max_size=len(mask)))

    return Step(per_row(number), per_row(st.integers(-1, 3)), like_mask(), like_mask(), mask)


def padded(rows: list[list[float]], width: int) -> np.ndarray:
    return np.array([row + [0.0] * (width - len(row)) for row in rows], dtype=np.float64)  # (B, R)


def recursion(step: Step, gamma: float, decay: float, *, with_values: bool) -> tuple[np.ndarray, ...]:
    """Sums of the discounted deltas over the trained tokens from each one on, values, and mask, (B, R)."""
    width = max(map(len, step.mask))
    rewards, values, mask = (padded(rows, width) for rows in (step.rewards, step.values, step.mask))
    values = values * with_values
    sums = np.zeros_like(rewards)
    ahead, next_value = np.zeros(len(rewards)), np.zeros(len(rewards))
    for t in reversed(range(width)):
        on = mask[:, t] > 0
        ahead = np.where(on, rewards[:, t] + gamma * next_value - values[:, t] + decay * ahead, ahead)
        next_value = np.where(on, values[:, t], next_value)
        sums[:, t] = ahead
    return sums, values, mask > 0


def whitened(table: np.ndarray, mask: np.ndarray) -> np.ndarray:
    picked = table[mask]
    variance = picked.var(ddof=1) if len(picked) > 1 else 0.0
    mean = picked.mean() if len(picked) else 0.0
    return np.where(mask, (table - mean) / math.sqrt(variance + 1e-8), 0.0)


def of_group(step: Step, row: int) -> tuple[float, list[float]]:
    """A row's score, and those of the others of its group."""
    others = [
        score
        for other, score in enumerate(step.scores)
        if step.groups[other] == step.groups[row] and other != row
    ]
    return step.scores[row], others


def leave_one_out(step: Step, row: int) -> float:
    score, others = of_group(step, row)
    return score - np.mean(others) if others else score


def group_relative(step: Step, row: int) -> float:
    score, others = of_group(step, row)
    group = np.array([score, *others])
    return (score - group.mean()) / (group.std(ddof=1) + 1e-6) if others else score / (1 + 1e-6)


def reference(config: AlgorithmConfig, step: Step) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns (B, R)."""
    gamma, lam = config.gamma, config.lam
    if config.adv_estimator == "gae":
        sums, values, mask = recursion(step, gamma, gamma * lam, with_values=True)
        return whitened(sums, mask), np.where(mask, sums + values, 0.0)
    if config.adv_estimator == "reinforce_plus_plus":
        sums, _, mask = recursion(step, gamma, gamma, with_values=False)
        return whitened(sums, mask), np.where(mask, sums, 0.0)
    of_row = {"grpo": group_relative, "rloo": leave_one_out}[config.adv_estimator]
    numbers = np.array([of_row(step, row) for row in range(len(step.scores))])
    table = numbers[:, None] * padded(step.mask, max(map(len, step.mask)))
    return table, table


CONFIGS = st.builds(
    AlgorithmConfig,
    adv_estimator=st.sampled_from(sorted(ESTIMATORS)),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
)


@settings(deadline=None, max_examples=200)
@given(CONFIGS, steps())
def test_every_estimator_agrees_with_padded_tables(config, step):
    for found, expected in zip(step.estimated(config), reference(config, step)):
        for row, wanted in zip(found, expected):
            assert row == pytest.approx(wanted[: len(row)].tolist(), rel=1e-6, abs=1e-7)


@settings(deadline=None, max_examples=200)
@given(CONFIGS, steps(), st.data())
def test_the_order_of_rows_is_that_of_the_results(config, step, data):
    order = data.draw(st.permutations(range(len(step.scores))))
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
    )
    assert [column.dtype for column in found] == [torch.float32] * 2
    assert all(column.abs().sum() > 0 for column in found)


def test_which_estimators_need_a_critic():
    assert [name for name, estimator in ESTIMATORS.items() if estimator.critic] == ["gae"]
    assert [name for name, estimator in ESTIMATORS.items() if estimator.groups] == ["grpo", "rloo"]
    assert [name for name, estimator in ESTIMATORS.items() if estimator.per_trajectory] == ["grpo", "rloo"]
