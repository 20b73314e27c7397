"""Advantage estimators: values computed by hand, and agreement with plain loops for all inputs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydraflow.algorithms.advantages import estimate_advantages
from hydraflow.algorithms.config import ESTIMATORS, AlgorithmConfig
from hydraflow.algorithms.gae import gae
from hydraflow.algorithms.grpo import grpo
from hydraflow.algorithms.reinforce_plus_plus import reinforce_plus_plus, return_to_go
from hydraflow.algorithms.rloo import rloo


def f64(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def whitened(values, mask):
    """Plain loops: mean 0, unbiased variance 1 over the selected."""
    picked = [v for vs, ms in zip(values, mask) for v, m in zip(vs, ms) if m]
    mean = sum(picked) / max(len(picked), 1)
    var = sum((v - mean) ** 2 for v in picked) / max(len(picked) - 1, 1)
    return [
        [(v - mean) / math.sqrt(var + 1e-8) if m else 0.0 for v, m in zip(vs, ms)]
        for vs, ms in zip(values, mask)
    ]


def gae_of_row(rewards, values, mask, gamma, lam):
    """The definition, over the trained tokens alone: A_i = sum over j >= i of (gamma lam)^(j - i) delta_j."""
    kept = [t for t, m in enumerate(mask) if m]
    ahead = [values[t] for t in kept[1:]] + [0.0]
    deltas = [rewards[t] + gamma * v - values[t] for t, v in zip(kept, ahead)]
    out = [0.0] * len(mask)
    for i, t in enumerate(kept):
        out[t] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(kept)))
    return out


@st.composite
def batches(draw):
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    number = st.floats(-5, 5, width=32)

    def table(cell):
        return draw(st.lists(st.lists(cell, min_size=width, max_size=width), min_size=rows, max_size=rows))

    return dict(
        rewards=table(number),
        values=table(number),
        mask=table(st.integers(0, 1)),
        gamma=draw(st.sampled_from([1.0, 0.9])),
    )


def test_gae_by_hand():
    # delta_2 = 1 - 0.5 = 0.5; delta_1 = 0 + 0.5 * 0.5 - 0.25 = 0; A_1 = 0 + 0.5 * 0.5 * 0.5 = 0.125
    advantages, returns = gae(
        f64([[0, 1, 0]]), torch.tensor([[1, 1, 0]]), values=f64([[0.25, 0.5, 9]]), gamma=0.5, lam=0.5
    )
    assert returns.tolist() == [[0.375, 1.0, 0.0]]
    half = 1 / math.sqrt(2)
    assert advantages[0].tolist() == pytest.approx([-half, half, 0.0], abs=1e-6)


def test_gae_steps_over_observations():
    packed = gae(f64([[0, 2, 1]]), torch.ones(1, 3), values=f64([[0.3, 0.6, 0.1]]), gamma=0.9, lam=0.8)
    spread = gae(
        f64([[0, 0, 2, 0, 1]]),
        torch.tensor([[1, 0, 1, 0, 1]]),
        values=f64([[0.3, 77, 0.6, float("nan"), 0.1]]),
        gamma=0.9,
        lam=0.8,
    )
    for short, long in zip(packed, spread):
        assert long[:, [0, 2, 4]].tolist() == short.tolist()
        assert long[:, [1, 3]].tolist() == [[0.0, 0.0]]


@settings(deadline=None, max_examples=40)
@given(batches(), st.sampled_from([1.0, 0.95, 0.0]))
def test_gae_is_its_definition(batch, lam):
    mask = batch["mask"]
    raw = [
        gae_of_row(r, v, m, batch["gamma"], lam) for r, v, m in zip(batch["rewards"], batch["values"], mask)
    ]
    returns = [[a + v if m else 0.0 for a, v, m in zip(*row)] for row in zip(raw, batch["values"], mask)]
    got = gae(
        f64(batch["rewards"]), torch.tensor(mask), values=f64(batch["values"]), gamma=batch["gamma"], lam=lam
    )
    assert torch.allclose(got[1], f64(returns), atol=1e-10)
    assert torch.allclose(got[0], f64(whitened(raw, mask)), atol=1e-7)


@settings(deadline=None, max_examples=40)
@given(batches())
def test_reinforce_plus_plus_is_its_definition(batch):
    expected = []
    for rewards, mask in zip(batch["rewards"], batch["mask"]):
        kept = [t for t, m in enumerate(mask) if m]
        row = [0.0] * len(mask)
        for i, t in enumerate(kept):
            row[t] = sum(batch["gamma"] ** (j - i) * rewards[kept[j]] for j in range(i, len(kept)))
        expected.append(row)
    advantages, returns = reinforce_plus_plus(
        f64(batch["rewards"]), torch.tensor(batch["mask"]), gamma=batch["gamma"]
    )
    assert torch.allclose(returns, f64(expected), atol=1e-10)
    assert torch.allclose(advantages, f64(whitened(expected, batch["mask"])), atol=1e-7)


def test_return_to_go_by_hand():
    assert return_to_go(f64([[1, 0, 4, 0]]), torch.tensor([[1, 1, 1, 0]]), gamma=0.5).tolist() == [
        [2.0, 2.0, 4.0, 0.0]
    ]


REWARDS = f64([[0, 1], [3, 0], [0, 5], [0, 8]])
SCORES = REWARDS.sum(1)
MASK = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]])
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
    config = AlgorithmConfig(adv_estimator="rloo")
    advantages, returns = estimate_advantages(config, SCORES, REWARDS, MASK, group_ids=IDS)
    assert advantages.tolist() == returns.tolist() == [[-4, -4], [3, 0], [4, 4], [8, 8]]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-10, 10)), min_size=1, max_size=10))
def test_group_estimators_agree_with_loops(rows):
    scores, ids = f64([s for _, s in rows]), torch.tensor([i for i, _ in rows])
    ours_grpo, ours_rloo = grpo(scores, group_ids=ids), rloo(scores, group_ids=ids)
    for row, (i, score) in enumerate(rows):
        others = [s for j, (k, s) in enumerate(rows) if k == i and j != row]
        baseline = sum(others) / len(others) if others else 0.0
        assert ours_rloo[row].item() == pytest.approx(score - baseline, abs=1e-9)
        group = [score, *others]
        mean = sum(group) / len(group) if others else 0.0
        std = math.sqrt(sum((s - mean) ** 2 for s in group) / len(others)) if others else 1.0
        assert ours_grpo[row].item() == pytest.approx((score - mean) / (std + 1e-6), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_estimator_keeps_shape_and_dtype_and_is_zero_outside_the_mask(name, dtype):
    rewards = REWARDS.to(dtype)
    config = AlgorithmConfig(adv_estimator=name, gamma=0.9, lam=0.9)
    values = torch.full_like(rewards, 0.5)
    for result in estimate_advantages(config, rewards.sum(1), rewards, MASK, values=values, group_ids=IDS):
        assert result.shape == rewards.shape and result.dtype == dtype
        assert result[1, 1].item() == 0.0
        assert result.abs().sum().item() > 0.0


@pytest.mark.parametrize("name", ESTIMATORS)
def test_padding_columns_and_padding_rows_of_no_token_change_no_advantage(name):
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(4, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    mask, ids = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]]), torch.tensor([0, 1, 0, 1])
    rewards = rewards * mask
    wide = lambda x: torch.nn.functional.pad(x, (0, 2, 0, 1))  # noqa: E731
    config = AlgorithmConfig(adv_estimator=name)
    plain = estimate_advantages(config, rewards.sum(1), rewards, mask, values=values, group_ids=ids)
    longer, wider = torch.tensor([0, 1, 0, 1, 7]), wide(rewards)
    padded = estimate_advantages(
        config, wider.sum(1), wider, wide(mask), values=wide(values), group_ids=longer
    )
    for before, after in zip(plain, padded):
        assert torch.allclose(wide(before), after, atol=1e-12)


def test_which_estimators_need_a_critic():
    assert [name for name, estimator in ESTIMATORS.items() if estimator.critic] == ["gae"]
    assert [name for name, estimator in ESTIMATORS.items() if estimator.groups] == ["grpo", "rloo"]
