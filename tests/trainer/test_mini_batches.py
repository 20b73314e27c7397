"""Which rows share an optimizer step: never a matter of how many ranks there are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hydraflow.batch_plan.parts import MicroPlan, RolePlan
from hydraflow.protocol.batch import DataProto
from hydraflow.trainer.mini_batches import MiniBatches, cut_mini_batches, dispatched


def plan_of(ranks: int, prompts: int, samples: int = 1, *, whole: bool = False) -> RolePlan:
    """Mini-batches of `prompts` prompts with `samples` rows each."""
    return RolePlan(
        data_ranks=ranks,
        mini_batch_prompts=prompts,
        mini_batch_trajectories=prompts * samples,
        rows_per_rank=prompts * samples // ranks,
        epochs=1,
        shuffle=False,
        micro=MicroPlan(rows=1, max_tokens=None, whole_groups=whole),
        optimizer_steps_per_step=1,
    )


def equal_groups(rows: int, samples: int) -> np.ndarray:
    return np.repeat(np.arange(rows // samples), samples)


def mini_batches(cut: MiniBatches, ranks: int) -> list[list[int]]:
    """The live rows of each mini-batch, whichever rank has them."""
    found: list[list[int]] = [[] for _ in cut.rows_per_rank]
    ends = np.cumsum(cut.rows_per_rank)[:-1]
    for rows, live in zip(np.split(cut.order, ranks), np.split(cut.live, ranks), strict=True):
        for number, (part, alive) in enumerate(zip(np.split(rows, ends), np.split(live, ends), strict=True)):
            found[number] += part[alive].tolist()
    return [sorted(rows) for rows in found]


def test_prompt_order_without_balancing() -> None:
    """Two ranks, two mini-batches of four prompts with two samples: rank 0 gets the first half of each
    mini-batch."""
    plan = plan_of(ranks=2, prompts=4, samples=2)
    lengths = np.array([1, 9, 2, 8, 7, 3, 6, 5, 9, 1, 8, 2, 3, 7, 4, 6])
    cut = cut_mini_batches(lengths, equal_groups(16, 2), plan, balance=False, shuffle_key=None)
    assert cut.order.tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]
    assert cut.rows_per_rank == [4, 4] and cut.live.all()


def test_balancing_pairs_long_rows_with_short_ones() -> None:
    """Lengths 9 1 1 9: each rank gets one long and one short row, so 10 tokens."""
    lengths = np.array([9, 1, 1, 9])
    plan = plan_of(ranks=2, prompts=4)
    cut = cut_mini_batches(lengths, np.arange(4), plan, balance=True, shuffle_key=None)
    first, second = np.split(cut.order, 2)
    assert lengths[first].sum() == lengths[second].sum() == 10


@pytest.mark.parametrize(
    ("prompt", "heaviest"),
    [(1, 11), (9, 24)],  # whole 15 tokens and a prompt, against 3; divided 9 and two prompts each
)
def test_groups_are_divided_where_a_prompt_computed_twice_costs_less_than_a_longer_rank(
    prompt: int, heaviest: int
) -> None:
    """Responses of 7 and 8 tokens to one prompt, of 2 and 1 to the other, on two ranks."""
    responses = np.array([7, 8, 2, 1])
    prompts, groups = np.full(4, prompt), equal_groups(4, 2)
    cut = cut_mini_batches(
        responses + prompts, groups, plan_of(2, 2, 2), balance=True, shuffle_key=None, prompt_lengths=prompts
    )
    parts = np.split(cut.order, 2)
    tokens = [responses[rows].sum() + prompt * len(set(groups[rows])) for rows in parts]
    assert max(tokens) == heaviest


@pytest.mark.parametrize("balance", [False, True])
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    prompts=st.integers(1, 5),
    seed=st.integers(0, 1000),
    shuffled=st.booleans(),
)
def test_a_mini_batch_does_not_depend_on_the_number_of_ranks(
    balance: bool, sizes: list[int], prompts: int, seed: int, shuffled: bool
) -> None:
    """Groups of any size, in any order: a mini-batch has whole groups, every row is in one of them, and a
    rank has at most one row more than it would have if rows could be divided."""
    draw = np.random.default_rng(seed)
    groups = draw.permutation(np.repeat(draw.permutation(100)[: len(sizes)], sizes))
    if not len(groups):
        return
    lengths = draw.integers(1, 100, size=len(groups))
    found = []
    for ranks in (1, 2, 3, 4):
        cut = cut_mini_batches(
            lengths,
            groups,
            plan_of(ranks, prompts),
            balance=balance,
            shuffle_key=(seed, 7) if shuffled else None,
        )
        found.append(mini_batches(cut, ranks))
        assert cut.rows_per_rank == [-(-len(rows) // ranks) for rows in found[-1]]
        assert len(cut.order) == len(cut.live) == ranks * sum(cut.rows_per_rank)
    assert found[0] == found[1] == found[2] == found[3]
    assert sorted(row for rows in found[0] for row in rows) == list(range(len(groups)))
    owners = [set(groups[rows].tolist()) for rows in found[0]]
    assert [len(owner) for owner in owners[:-1]] == [prompts] * (len(owners) - 1)
    assert sum(map(len, owners)) == len(set(groups.tolist()))


def test_shuffling_keeps_the_samples_of_a_prompt_together() -> None:
    plan = plan_of(ranks=1, prompts=2, samples=3)
    cut = cut_mini_batches(np.ones(12), equal_groups(12, 3), plan, balance=False, shuffle_key=(1, 1))
    prompts = (cut.order // 3).reshape(4, 3)
    assert (prompts == prompts[:, :1]).all()
    assert sorted(prompts[:, 0].tolist()) == [0, 1, 2, 3]
    assert prompts[:, 0].tolist() != [0, 1, 2, 3]


def test_the_shortest_row_fills_up() -> None:
    """Rows of 4, 2 and 3 tokens for two ranks: the second row is read again, and not trained."""
    cut = cut_mini_batches(np.array([4, 2, 3]), np.zeros(3), plan_of(2, 1), balance=True, shuffle_key=None)
    assert sorted(cut.order.tolist()) == [0, 1, 1, 2]
    assert cut.order[~cut.live].tolist() == [1]


@pytest.mark.parametrize("balance", [False, True])
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    prompts=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_groups_that_are_kept_have_one_rank(balance: bool, sizes: list[int], prompts: int, seed: int) -> None:
    """Groups of any size, in any order: the same mini-batches as with divided groups, a group's live rows
    next to each other on one rank."""
    draw = np.random.default_rng(seed)
    groups = draw.permutation(np.repeat(draw.permutation(100)[: len(sizes)], sizes))
    lengths = draw.integers(1, 100, size=len(groups))
    one = cut_mini_batches(lengths, groups, plan_of(1, prompts), balance=balance, shuffle_key=None)
    for ranks in (1, 2, 3, 4):
        plan = plan_of(ranks, prompts, whole=True)
        cut = cut_mini_batches(lengths, groups, plan, balance=balance, shuffle_key=None)
        assert mini_batches(cut, ranks) == mini_batches(one, 1)
        assert len(cut.order) == len(cut.live) == ranks * sum(cut.rows_per_rank)
        owners = groups[cut.order[cut.live]]
        assert 1 + int((np.diff(owners) != 0).sum()) == len(sizes), "a group is in two places"


def test_as_many_groups_for_each_rank_where_they_are_equal() -> None:
    """Groups of 20, 2, 2 and 2 tokens on two ranks: two each, though one against three would be closer."""
    lengths, groups = np.array([10, 10, 1, 1, 1, 1, 1, 1]), equal_groups(8, 2)
    plan = plan_of(2, 4, 2, whole=True)
    cut = cut_mini_batches(lengths, groups, plan, balance=True, shuffle_key=None)
    assert cut.live.all() and cut.rows_per_rank == [4]
    in_order = cut_mini_batches(lengths, groups, plan, balance=False, shuffle_key=None)
    assert in_order.order.tolist() == list(range(8))


@pytest.mark.parametrize(("balance", "first"), [(False, [0, 1, 2, 3]), (True, [0, 1, 2])])
def test_groups_of_other_sizes_are_kept_and_balanced_by_tokens(balance: bool, first: list[int]) -> None:
    """Groups of 3, 1, 1 and 1 rows of equal lengths, on two ranks."""
    groups, plan = np.array([0, 0, 0, 1, 2, 3]), plan_of(ranks=2, prompts=4, whole=True)
    cut = cut_mini_batches(np.full(6, 10), groups, plan, balance=balance, shuffle_key=None)
    mine, _ = np.split(cut.order, 2)
    assert sorted(mine[cut.live[: len(mine)]].tolist()) == first


def test_dead_rows_and_other_sizes_are_dispatched_with_the_rows() -> None:
    rows, plan = DataProto.from_dict({"number": torch.arange(5)}), plan_of(ranks=2, prompts=2)

    def sent(count: int) -> DataProto:
        lengths, groups = np.ones(count), np.arange(count)
        cut = cut_mini_batches(lengths, groups, plan, balance=False, shuffle_key=None)
        return dispatched(rows, cut, plan)

    assert sent(4).get("number").tolist() == [0, 2, 1, 3] and list(sent(4).keys()) == ["number"]
    assert sent(3).get("live").tolist() == [True, True, True, False]
    assert sent(4).meta_info == sent(3).meta_info == {}
    plan = plan_of(ranks=2, prompts=4)
    assert sent(5).meta_info == {"rows_per_rank": [2, 1]}, "the second is smaller than planned"
