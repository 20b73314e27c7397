"""Memory that runs out in an update: smaller micro-batches, the same gradient, and what fits is
remembered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine.pool import Ranks
from engine.rank_jobs import make_batch
from workers import fault_jobs as jobs
from workers.gradient_jobs import Training, rows, tokens

from hydraflow.batch_plan.parts import MicroPlan
from hydraflow.engine.base import OomReport
from hydraflow.engine.micro_batcher import MicroBatcher, split_groups, split_rows, split_tokens
from hydraflow.errors import DoesNotFit
from hydraflow.models.packing import row_tokens
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto

PREFIX = {"policy": "actor", "value": "critic"}


def without_counts(metrics: Mapping[str, float]) -> dict[str, float]:
    """And without speeds."""
    return {
        name: value
        for name, value in metrics.items()
        if not name.endswith("/oom_splits") and not name.startswith("perf/")
    }


@pytest.fixture(scope="module")
def with_memory(tiny: str, ranks: Ranks) -> Callable[[str, int], list[dict[str, Any]]]:
    """What the ranks do, by head and rows in a micro-batch, where memory does not run out."""
    known: dict[tuple[str, int], list[dict[str, Any]]] = {}

    def found(head: str, number: int) -> list[dict[str, Any]]:
        if (head, number) not in known:
            training = Training(head, rows(number))
            known[head, number] = ranks.run(jobs.update_with_little_memory, tiny, training, [], 0)
        return known[head, number]

    return found


@pytest.mark.parametrize("short", [[0], [1], [0, 1]], ids=["first rank", "last rank", "both ranks"])
@pytest.mark.parametrize("head", PREFIX)
def test_an_update_is_that_of_a_smaller_plan(
    tiny: str, ranks: Ranks, with_memory: Callable[..., Any], head: str, short: list[int]
) -> None:
    """Two rows of a rank in each mini-batch, memory for one: one split, in the first of eight optimizer
    steps."""
    found = ranks.run(jobs.update_with_little_memory, tiny, Training(head, rows(2)), short, 1)
    small_and_whole = with_memory(head, 1), with_memory(head, 2)
    for rank, (mine, other, planned) in enumerate(zip(found, *small_and_whole, strict=True)):
        assert [metrics[f"{PREFIX[head]}/oom_splits"] for metrics in mine["metrics"]] == [1.0, 0.0]
        assert [without_counts(metrics) for metrics in mine["metrics"]] == [
            without_counts(metrics) for metrics in other["metrics"]
        ]
        assert mine["plan"] == rows(1)
        for name, weight in other["weights"].items():
            assert torch.equal(mine["weights"][name], weight), name
            torch.testing.assert_close(weight, planned["weights"][name], rtol=0, atol=1e-9)
        assert (planned["passes"], other["passes"], mine["passes"]) == (
            8,
            16,
            16 + (2 if rank in short else 1),
        )


def test_a_budget_of_tokens_shrinks_until_it_fits(
    tiny: str, ranks: Ranks, with_memory: Callable[..., Any]
) -> None:
    """All rows of a mini-batch fit into 100 tokens, memory is for one row: the budget becomes the longest
    row, then one row at a time."""
    found = ranks.run(jobs.update_with_little_memory, tiny, Training("policy", tokens(100)), [0], 1)
    for mine, other in zip(found, with_memory("policy", 1), strict=True):
        assert 1 <= mine["metrics"][0]["actor/oom_splits"] <= 3
        for name, weight in other["weights"].items():
            torch.testing.assert_close(mine["weights"][name], weight, rtol=0, atol=1e-9)


def test_passes_that_only_compute(tiny: str, ranks: Ranks) -> None:
    """Four rows a rank, memory for one on rank 1: 4, 2, 1; the update that comes next tells of both
    splits."""
    found = ranks.run(jobs.infer_with_little_memory, tiny, rows(4), 1)
    plain = ranks.run(jobs.infer_with_little_memory, tiny, rows(1), 0)
    for mine, other in zip(found, plain, strict=True):
        assert mine["plan"] == rows(1) and mine["metrics"]["actor/oom_splits"] == 2.0
        assert all(torch.equal(said, other["said"][0]) for said in mine["said"])


def test_a_single_row_that_does_not_fit(tiny: str, ranks: Ranks) -> None:
    first, second = ranks.run(jobs.update_without_memory, tiny)
    assert first == second
    assert DoesNotFit.exit_code == 3
    assert (
        first.startswith("update of the actor: rank 1 has no memory for a single row of ")
        and "offload_policy=true" in first
    )


def lengths(*sizes: int) -> DataProto:
    """Rows of that many tokens, one of them the prompt."""
    ones = [torch.ones(size - 1, dtype=torch.int64) for size in sizes]
    return DataProto.from_dict(
        {
            "prompts": ragged.from_rows([torch.ones(1, dtype=torch.int64)] * len(sizes)),
            "responses": ragged.from_rows(ones),
        }
    )


def after(plan: MicroPlan, data: DataProto, *reports: tuple[int, int]) -> list[MicroPlan]:
    """The sizes after micro-batches of that many rows and tokens did not fit."""
    micro_batcher, found = MicroBatcher(plan, "test"), []
    for number, tokens_short in reports:
        micro_batcher.make_smaller(data, [OomReport(0, number, tokens_short)], lambda own, how: own)
        found.append(micro_batcher.plan)
    return found


def test_sizes() -> None:
    data: Any = lengths(10, 20, 30, 5, 5)
    assert after(rows(64), data, (5, 70), (3, 60)) == [rows(3), rows(2)], "five rows are all there are"
    assert after(tokens(1000), data, (5, 70), (3, 35)) == [tokens(35), tokens(30)]
    assert after(tokens(64), data, (3, 60), (2, 30)) == [tokens(30), rows(1)], (
        "no budget is below the longest row"
    )


def test_sizes_of_pairs() -> None:
    """Of three pairs two, then one, never half of one; a budget ends at one pair, too."""
    data: Any = lengths(10, 20, 30, 5, 5, 5)
    by_rows, by_tokens = (
        MicroPlan(rows=8, max_tokens=None, unit=2),
        MicroPlan(rows=None, max_tokens=64, unit=2),
    )
    smaller = [MicroPlan(rows=number, max_tokens=None, unit=2) for number in (4, 2)]
    assert after(by_rows, data, (6, 75), (4, 65)) == smaller
    found = after(by_tokens, data, (4, 64), (4, 40))
    assert found == [MicroPlan(rows=None, max_tokens=35, unit=2), smaller[1]], "the longest pair has 35"
    with pytest.raises(DoesNotFit, match="a single pair of 35 tokens"):
        after(smaller[1], data, (2, 35))


def test_rows_in_order_and_back() -> None:
    data = make_batch()
    parts = split_rows(data, 3)
    assert [len(part) for part in parts.parts] == [3, 3, 2]
    assert parts.restore(data) is data
    assert split_rows(data, 8).parts[0] is data


@pytest.mark.parametrize("agreed", [1, 5])
def test_tokens_within_budget_and_back(agreed: int) -> None:
    data = make_batch()
    parts = split_tokens(data, 30, lambda own: torch.maximum(own, torch.tensor([float(agreed)])))
    sizes = [
        int((ragged.lengths(p.batch["prompts"]) + ragged.lengths(p.batch["responses"])).sum())
        for p in parts.parts
    ]
    assert max(sizes) <= 30 and len(sizes) >= agreed
    joined = type(data).concat(parts.parts)
    for name in ("responses", "prompts"):
        restored = ragged.rows(parts.restore(joined).batch[name])
        assert all(torch.equal(a, b) for a, b in zip(restored, ragged.rows(data.batch[name]), strict=True))
    assert sorted(parts.order.tolist()) == list(np.arange(8))


def test_pairs_stay_together_within_the_budget() -> None:
    """Bins of rows alone would put a long row's partner elsewhere."""
    data = lengths(20, 3, 8, 9, 2, 2, 10, 10)
    parts = split_tokens(data, 24, lambda own: own, unit=2)
    pairs = parts.order.reshape(-1, 2)
    assert (pairs[:, 0] % 2 == 0).all() and (pairs[:, 1] == pairs[:, 0] + 1).all()
    sizes = [int(ragged.lengths(part.get("responses")).sum()) + len(part) for part in parts.parts]
    assert len(sizes) == 3 and sum(sizes) == 64 and max(sizes) <= 24
    assert all(len(part) % 2 == 0 for part in parts.parts)
    alone = split_tokens(data, 24, lambda own: own).order.reshape(-1, 2)
    assert not (alone[:, 1] == alone[:, 0] + 1).all()
    with pytest.raises(ValueError, match="23"):
        split_tokens(data, 22, lambda own: own, unit=2)


@pytest.mark.parametrize("fewest", [1, 3, 5])
@pytest.mark.parametrize("by_rows", [False, True])
def test_groups_stay_together_if_there_are_enough_of_them(by_rows: bool, fewest: int) -> None:
    """Groups of 2, 3, 1 and 2 rows. Another rank's fifth micro-batch divides one of the largest."""
    data = lengths(20, 3, 8, 9, 2, 2, 10, 10).union(
        DataProto.from_dict({"group": torch.tensor([4, 4, 1, 1, 1, 7, 2, 2])})
    )
    size = MicroPlan(rows=3, max_tokens=None) if by_rows else MicroPlan(rows=None, max_tokens=25)
    found = split_groups(
        data,
        replace(size, whole_groups=True),
        lambda own: torch.maximum(own, torch.tensor([float(fewest)])),
    )
    owners = [sorted(set(part.get("group").tolist())) for part in found.parts]
    assert len(owners) == max(fewest, 3)
    assert sum(map(len, owners)) == (4 if fewest < 5 else 5)
    costs = [len(part) if by_rows else int(row_tokens(part).sum()) for part in found.parts]
    assert max(costs) <= (3 if by_rows else 25)
    restored = found.restore(DataProto.concat(found.parts))
    assert restored.get("group").tolist() == data.get("group").tolist()


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (MicroPlan(rows=None, max_tokens=30), [[0, 5], [1, 2], [3, 4]]),
        (MicroPlan(rows=None, max_tokens=30, unit=2), [[0, 1], [2, 3], [4, 5]]),
        (MicroPlan(rows=None, max_tokens=30, whole_groups=True), [[0, 1], [2, 3], [4, 5]]),
        (MicroPlan(rows=3, max_tokens=None), [[0, 1, 2], [3, 4, 5]]),
        (MicroPlan(rows=3, max_tokens=None, whole_groups=True), [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_a_plan_says_what_stays_together(size: MicroPlan, expected: list[list[int]]) -> None:
    group = DataProto.from_dict({"group": torch.tensor([8, 8, 5, 5, 6, 6])})
    found = MicroBatcher(size, "x").cut(lengths(20, 10, 15, 15, 10, 8).union(group), lambda own, how: own)
    order = iter(found.order.tolist())
    assert sorted(sorted(next(order) for _ in range(len(part))) for part in found.parts) == expected


def test_dead_rows_are_in_no_group() -> None:
    """Three of a group of three repeat its last row: they cost nothing and are next to it."""
    data = lengths(*[9] * 6).union(
        DataProto.from_dict(
            {
                "group": torch.tensor([5, 5, 2, 2, 2, 2]),
                "live": torch.tensor([True, True, True, False, False, False]),
            }
        )
    )
    for size in (MicroPlan(rows=3, max_tokens=None), MicroPlan(rows=None, max_tokens=27)):
        found = split_groups(data, replace(size, whole_groups=True), lambda own: own)
        assert len(found.parts) == 1
    found = split_groups(data, MicroPlan(rows=2, max_tokens=None, whole_groups=True), lambda own: own)
    live = [sorted(part.get("group")[part.get("live")].tolist()) for part in found.parts]
    assert sorted(live) == [[2], [5, 5]]


def test_a_group_over_the_budget_is_divided() -> None:
    """Six rows of 10 tokens with a budget of 25, as after an out-of-memory error: two and one, twice."""
    data = lengths(*[9] * 6).union(DataProto.from_dict({"group": torch.zeros(6, dtype=torch.int64)}))
    tight = MicroPlan(rows=None, max_tokens=25, whole_groups=True)
    found = split_groups(data, tight, lambda own: own)
    assert sorted(map(len, found.parts)) == [2, 2, 2] and sorted(found.order.tolist()) == list(range(6))
    assert after(tight, data, (2, 24)) == [MicroPlan(rows=None, max_tokens=12, whole_groups=True)]


def test_a_row_over_the_budget_is_named() -> None:
    with pytest.raises(ValueError):
        split_tokens(make_batch(), 4, lambda own: own)
