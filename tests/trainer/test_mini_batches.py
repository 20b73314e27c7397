"""Which rows share an optimizer step: never a matter of how many ranks there are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydraflow.batch_plan.parts import RolePlan
from hydraflow.trainer.mini_batches import mini_batch_order


def mini_batches(order: np.ndarray, plan: RolePlan) -> list[set[int]]:
    """The rows of each mini-batch, whichever rank has them."""
    per_rank = np.split(order, plan.data_ranks)
    cut = [np.split(rows, len(rows) // plan.rows_per_rank) for rows in per_rank]
    return [set(np.concatenate(parts).tolist()) for parts in zip(*cut, strict=True)]


def test_prompt_order_without_balancing() -> None:
    """Two ranks, two mini-batches of two prompts with two samples: rank 0 gets the first half of each
    mini-batch."""
    plan = RolePlan.simple(data_ranks=2, mini_batch_trajectories=4)
    order = mini_batch_order(np.ones(8), plan, 2, balance=False, shuffle_key=None)
    assert order.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_balancing_pairs_long_rows_with_short_ones() -> None:
    """Lengths 9 1 1 9: each rank gets one long and one short row, so 10 tokens."""
    lengths = np.array([9, 1, 1, 9])
    plan = RolePlan.simple(data_ranks=2, mini_batch_trajectories=4)
    first, second = np.split(mini_batch_order(lengths, plan, 1, balance=True, shuffle_key=None), 2)
    assert lengths[first].sum() == lengths[second].sum() == 10


@pytest.mark.parametrize("balance", [False, True])
@given(seed=st.integers(0, 1000), shuffled=st.booleans())
def test_a_mini_batch_does_not_depend_on_the_number_of_ranks(
    balance: bool, seed: int, shuffled: bool
) -> None:
    lengths = np.random.default_rng(seed).integers(1, 100, size=48)
    key = (seed, 7) if shuffled else None
    found = []
    for ranks in (1, 2, 4):
        plan = RolePlan.simple(data_ranks=ranks, mini_batch_trajectories=16)
        order = mini_batch_order(lengths, plan, 4, balance=balance, shuffle_key=key)
        assert sorted(order.tolist()) == list(range(48))
        found.append(mini_batches(order, plan))
    assert found[0] == found[1] == found[2]


def test_shuffling_keeps_the_samples_of_a_prompt_together() -> None:
    plan = RolePlan.simple(data_ranks=1, mini_batch_trajectories=6)
    order = mini_batch_order(np.ones(12), plan, 3, balance=False, shuffle_key=(1, 1))
    prompts = (order // 3).reshape(4, 3)
    assert (prompts == prompts[:, :1]).all()
    assert sorted(prompts[:, 0].tolist()) == [0, 1, 2, 3]
    assert prompts[:, 0].tolist() != [0, 1, 2, 3]
