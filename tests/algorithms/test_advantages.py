"""Advantage estimators: values computed by hand, and agreement with padded tables in float64 for all
inputs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydraflow.algorithms.advantages import estimate_advantages
from hydraflow.algorithms.config import ESTIMATORS, AlgorithmConfig, Estimator
from hydraflow.algorithms.gae import gae
from hydraflow.algorithms.grpo import grpo
from hydraflow.algorithms.reinforce_plus_plus import discounted_return
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


@dataclass(frozen=True)
class Step:
    """The rows of a step, each with one score, one group and a list of tokens, and what some estimators are
    given besides."""

    scores: list[float]
    groups: list[int]
    rewards: list[list[float]]
    values: list[list[float]]
    mask: list[list[int]]
    baselines: list[float]
    parts: list[list[float]]
    log_probs: list[list[float]]
    pi_squared: list[list[float]]

    @classmethod
    def of(cls, scores: list[float], groups: list[int]) -> Step:
        """Rows of one trained token each, of probability 1/2 in a vocabulary of two."""
        zero, half = [[0.0]] * len(scores), [[0.5]] * len(scores)
        rewards, logs = [[score] for score in scores], [[math.log(0.5)]] * len(scores)
        parts = [[score, 2 * score] for score in scores]
        return cls(scores, groups, rewards, zero, [[1]] * len(scores), scores, parts, logs, half)

    def rows(self, order: list[int]) -> Step:
        """These rows in that order."""
        return Step(*([column[row] for row in order] for column in vars(self).values()))

    def estimated(self, config: AlgorithmConfig) -> list[list[list[float]]]:
        """Advantages and returns, row by row, as the code computes them."""
        lengths = [len(row) for row in self.mask]
        flat = (self.rewards, self.values, self.mask, self.log_probs, self.pi_squared)
        rewards, values, mask, log_probs, pi_squared = (
            f64([x for row in rows for x in row]) for rows in flat
        )
        found = estimate_advantages(
            config,
            f64(self.scores),
            rewards,
            mask,
            torch.tensor(lengths),
            values=values,
            group_ids=torch.tensor(self.groups),
            reward_baselines=f64(self.baselines),
            reward_parts=f64(self.parts),
            old_log_probs=log_probs,
            sum_pi_squared=pi_squared,
        )
        assert all(column.dtype == torch.float64 for column in found)
        return [[row.tolist() for row in column.split(lengths)] for column in found]


@st.composite
def steps(draw) -> Step:
    """Rows of 0 to 6 tokens with any mask, of few or many groups."""
    mask = draw(st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=6))
    number = st.floats(-5, 5, width=32)

    def like_mask(cell=number) -> list[list[float]]:
        return [draw(st.lists(cell, min_size=len(row), max_size=len(row))) for row in mask]

    def per_row(cell):
        return draw(st.lists(cell, min_size=len(mask), max_size=len(mask)))

    return Step(
        per_row(number),
        per_row(st.integers(-1, 3)),
        like_mask(),
        like_mask(),
        mask,
        per_row(number),
        per_row(st.tuples(number, number).map(list)),
        like_mask(st.floats(-8, -0.125)),
        like_mask(st.floats(0.125, 1)),
    )


def drawn_step(seed: int, rows: int = 24, longest: int = 40) -> Step:
    """Ragged rows with holes in their masks, in groups of about four."""
    draw = np.random.default_rng(seed)
    mask = [(draw.random(draw.integers(1, longest + 1)) < 0.8).astype(int).tolist() for _ in range(rows)]

    def like_mask(low: float, high: float) -> list[list[float]]:
        return [draw.uniform(low, high, len(row)).tolist() for row in mask]

    def per_row(*shape: int) -> list[Any]:
        return draw.uniform(-5, 5, (rows, *shape)).tolist()

    groups = draw.integers(0, rows // 4, rows).tolist()
    given = per_row(), groups, like_mask(-5, 5), like_mask(-5, 5), mask, per_row(), per_row(2)
    return Step(*given, like_mask(-8, -0.125), like_mask(0.125, 1))


def oracle_difference(name: str) -> float:
    """The largest difference from the padded tables in 20 drawn steps, absolute, or relative where a value
    is above 1."""
    config = AlgorithmConfig(
        adv_estimator=name, gamma=0.9, lam=0.95, gdpo_reward_weights=[1.0, 0.5], gdpo_reward_keys=["a", "b"]
    )
    worst = 0.0
    for step in (suited(config, drawn_step(seed)) for seed in range(20)):
        for found, expected in zip(step.estimated(config), reference(config, step)):
            for row, wanted in zip(found, expected):
                wanted = wanted[: len(row)]
                apart = np.abs(np.array(row) - wanted) / np.maximum(1, np.abs(wanted))
                worst = max(worst, float(apart.max()))
    return worst


def padded(rows: list[list[float]], width: int) -> np.ndarray:
    return np.array([row + [0.0] * (width - len(row)) for row in rows], dtype=np.float64)  # (B, R)


def recursion(
    step: Step, gamma: float, decay: float | np.ndarray, *, with_values: bool
) -> tuple[np.ndarray, ...]:
    """Sums of the discounted deltas over the trained tokens from each one on, values, and mask, (B, R).
    `decay`: of all rows, or (B,)."""
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


def less_the_mean(step: Step, row: int) -> float:
    score, others = of_group(step, row)
    return score - np.mean([score, *others]) if others else score


def less_the_mean_by_tokens(step: Step, row: int) -> float:
    score, others = of_group(step, row)
    tokens = [sum(mask) for group, mask in zip(step.groups, step.mask) if group == step.groups[row]]
    scores = [score for group, score in zip(step.groups, step.scores) if group == step.groups[row]]
    return score - np.average(scores, weights=tokens) if others and sum(tokens) else score


def policy_gradient_of_groups(step: Step, row: int) -> float:
    nonzero = sum(score != 0 for score in step.scores)
    return less_the_mean(step, row) * len(step.scores) / max(nonzero, 1)


def over_the_second_best(step: Step, row: int) -> float:
    score, others = of_group(step, row)
    return max(0.0, score - max(others)) if others else 0.0


def over_the_second_best_divided(step: Step, row: int) -> float:
    score, others = of_group(step, row)
    if not others:
        return 0.0
    return over_the_second_best(step, row) / (np.std([score, *others], ddof=1) + 1e-6)


def of_success_rate(step: Step, row: int) -> float:
    score, others = of_group(step, row)
    mean = np.mean([score, *others])
    return (score - mean) / mean if mean > 0 else 0.0


OF_ROW = {
    "grpo": group_relative,
    "grpo_vectorized": group_relative,
    "grpo_passk": over_the_second_best_divided,
    "rloo": leave_one_out,
    "rloo_vectorized": lambda step, row: leave_one_out(step, row) if of_group(step, row)[1] else 0.0,
    "reinforce_plus_plus_baseline": less_the_mean,
    "opo": less_the_mean_by_tokens,
    "gpg": policy_gradient_of_groups,
    "maxrl": of_success_rate,
    "gdpo": lambda step, row: sum_of_comparisons(step, row, group_relative),
}
"""Estimators of one number for each row."""
UNDIVIDED = OF_ROW | {
    "grpo": less_the_mean,
    "grpo_vectorized": less_the_mean,
    "grpo_passk": over_the_second_best,
    "gdpo": lambda step, row: sum_of_comparisons(step, row, less_the_mean),
}
"""With norm_adv_by_std_in_grpo=false."""


def token_baselines(step: Step, *, tools: bool) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns (B, R) of the optimal token baseline; `tools`: places among trained tokens."""
    returns, _, mask = recursion(step, 1.0, 1.0, with_values=False)
    advantages = np.where(mask, returns, 0.0)
    at: dict[tuple[int, int], list[tuple[int, int, float]]] = {}
    for row, group in enumerate(step.groups):
        energy, trained = 0.0, 0
        for t, on in enumerate(step.mask[row]):
            if on:
                energy += 1 - 2 * math.exp(step.log_probs[row][t]) + step.pi_squared[row][t]
                at.setdefault((group, trained if tools else t), []).append((row, t, energy))
                trained += 1
    for (group, _), tokens in at.items():
        if step.groups.count(group) == 1 or (tools and len(tokens) == 1):
            continue
        baseline = sum(w * returns[row, t] for row, t, w in tokens) / (sum(w for *_, w in tokens) + 1e-8)
        for row, t, _ in tokens:
            advantages[row, t] -= baseline
    return advantages, np.where(mask, returns, 0.0)


def sum_of_comparisons(step: Step, row: int, compared: Callable[[Step, int], float]) -> float:
    """With the weights 1 and 1/2."""
    first, second = (compared(replace(step, scores=list(column)), row) for column in zip(*step.parts))
    return first + 0.5 * second


def reference(config: AlgorithmConfig, step: Step) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns (B, R)."""
    gamma, lam = config.gamma, config.lam
    if config.adv_estimator in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        return token_baselines(step, tools=config.adv_estimator.startswith("tir"))
    if config.adv_estimator == "remax":
        sums, _, mask = recursion(step, 1.0, 1.0, with_values=False)
        baselines = np.array(step.baselines)[:, None]
        return np.where(mask, sums - baselines, 0.0), np.where(mask, sums, 0.0)
    if config.adv_estimator == "gae":
        of_policy: float | np.ndarray = lam
        if config.lam_length_alpha is not None:
            trained = np.array([max(sum(mask), 1) for mask in step.mask])
            of_policy = np.maximum(0, 1 - 1 / (config.lam_length_alpha * trained))
        sums, values, mask = recursion(step, gamma, gamma * of_policy, with_values=True)
        gamma = gamma if config.critic_gamma is None else config.critic_gamma
        lam = lam if config.critic_lam is None else config.critic_lam
        ahead, _, _ = recursion(step, gamma, gamma * lam, with_values=True)
        return whitened(sums, mask), np.where(mask, ahead + values, 0.0)
    if config.adv_estimator in ("reinforce", "reinforce_plus_plus"):
        sums, _, mask = recursion(step, gamma, gamma, with_values=False)
        returns = np.where(mask, sums, 0.0)
        return whitened(sums, mask) if config.adv_estimator == "reinforce_plus_plus" else returns, returns
    of_row = (OF_ROW if config.norm_adv_by_std_in_grpo else UNDIVIDED)[config.adv_estimator]
    numbers = np.array([of_row(step, row) for row in range(len(step.scores))])
    mask = padded(step.mask, max(map(len, step.mask)))
    table = numbers[:, None] * mask
    if config.adv_estimator in ("reinforce_plus_plus_baseline", "gdpo"):
        table = whitened(table, mask > 0)
    return table, table


def suited(config: AlgorithmConfig, step: Step) -> Step:
    """The step with scores of 0 and 1 where the estimator is made for those."""
    if config.adv_estimator != "maxrl":
        return step
    return replace(step, scores=[float(score > 0) for score in step.scores])


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


@pytest.mark.parametrize("name", COMPARING)
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
    ["grpo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "maxrl", "gdpo"],
)
@settings(deadline=None, max_examples=20)
@given(grouped(st.integers(0, 4).map(float)), st.sampled_from([0.5, 3.0]))
def test_the_scale_of_scores_changes_nothing(name, step, scale):
    """But for the 1e-6 beside the standard deviation."""
    config = AlgorithmConfig(adv_estimator=name)
    scaled = Step.of([scale * score for score in step.scores], step.groups)
    for row, other in zip(step.estimated(config)[0], scaled.estimated(config)[0]):
        assert row == pytest.approx(other, abs=1e-5)


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


def test_only_gae_needs_a_critic():
    assert [name for name, estimator in ESTIMATORS.items() if estimator.critic] == ["gae"]
