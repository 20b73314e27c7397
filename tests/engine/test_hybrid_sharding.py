"""Hybrid sharding (HSDP), `fsdp_size` below the number of ranks: the numbers of one rank alone, on four ranks
that hold one, two or four copies of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from engine import oom_jobs
from engine import rank_jobs as jobs
from engine.alike import assert_same, assert_sent
from engine.pool import Ranks

from hydraflow.engine.config import WrapPolicyConfig
from hydraflow.engine.shared_memory import LEAST_BYTES

DOUBLE = {"model_dtype": "fp64", "dtype": "fp64"}
RANKS = 4
GROUP_SIZES = (2, 4)
SIZES = (1, 2)
"""Ranks of a copy of the model."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "kept_gathered": {"fsdp": {"reshard_after_forward": False}},
    "one_unit": {"fsdp": {"wrap_policy": WrapPolicyConfig(min_num_params=10**6)}},
    "param_offload": {"fsdp": {"param_offload": True}},
    "offload_policy": {"fsdp": {"offload_policy": True}},
    "adapters": {"model": {"lora_rank": 2}},
    "value": {"head": "value"},
}
ALONE: dict[str, dict[str, Any]] = {}
"""How one rank alone trains, by layout."""


def with_size(options: Mapping[str, Any], size: int, **fsdp: Any) -> dict[str, Any]:
    return {**options, "fsdp": {**fsdp, **options.get("fsdp", {}), "fsdp_size": size}}


def test_neighbours_share_a_copy_and_deadlines_stay(ranks: Ranks) -> None:
    deadline = 120.0  # pool.py's
    found = ranks.run(jobs.groups_of, 2)
    assert found[1] == [([0, 1], deadline), ([1, 3], deadline)]
    assert found[2] == [([2, 3], deadline), ([0, 2], deadline)]


def test_all_groups_of_a_process_share_one_thread_for_their_bytes(ranks: Ranks) -> None:
    assert ranks.run(jobs.loops_of_gloo) == [1] * RANKS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize(
    ("window", "unreachable"),
    [(0, None), (2 * (RANKS - 1) * 64, None), (2**16, None), (2**16, 2)],
    ids=["gloo", "in_parts", "at_once", "unreachable"],
)
def test_ranks_exchange_parts(ranks: Ranks, window: int, unreachable: int | None, dtype: torch.dtype) -> None:
    numbers = torch.arange(100) % 3
    for rank, found in enumerate(ranks.run(jobs.exchanged, dtype, window, unreachable)):
        assert found["shared"] == (window > 0 and unreachable is None) and found["kept"] == []
        of_ranks = 10 * torch.arange(RANKS)[:, None] + numbers
        assert found["whole"].tolist() == of_ranks.to(dtype).tolist()
        wanted = (of_ranks + rank).to(dtype)
        assert found["total"].tolist() == wanted.sum(0).to(dtype).tolist()
        wanted[rank] = torch.full((100,), -1).to(dtype)
        assert found["received"].tolist() == wanted.tolist()


@pytest.mark.parametrize("numbers", [2, LEAST_BYTES])
def test_a_rank_that_sends_nothing_is_waited_for_until_the_deadline(ranks: Ranks, numbers: int) -> None:
    seconds, error = ranks.run(jobs.awaited_in_vain, numbers)[0]
    assert 0.9 < seconds < 30 and "Timed out" in error


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_is_that_of_one_rank(tiny: str, ranks: Ranks, layout: str, size: int) -> None:
    """Weights, gradient norms and outputs of two steps with two micro-batches each."""
    if layout not in ALONE:
        ALONE[layout] = jobs.train(tiny, with_size(LAYOUTS[layout], -1, **DOUBLE))
    alone = ALONE[layout]
    found = ranks.run(jobs.train, tiny, with_size(LAYOUTS[layout], size, **DOUBLE), 1)
    for rank in found:
        assert rank["reported"] == [pytest.approx(reported, rel=1e-12) for reported in alone["reported"]]
        assert_same(rank["weights"], alone["weights"], 1e-12)
        assert_same(rank["weights"], found[0]["weights"], 0.0)  # copies stay equal
    for step, wanted in enumerate(alone["seen"]):
        seen = torch.cat([rank["seen"][step] for rank in found])
        torch.testing.assert_close(seen, wanted, rtol=0, atol=1e-12)


def test_two_copies_on_two_ranks(tiny: str, pools: dict[int, Ranks]) -> None:
    found = pools[2].run(jobs.train, tiny, {"fsdp": {**DOUBLE, "fsdp_size": 1}})
    alone = jobs.train(tiny, {"fsdp": DOUBLE})
    for rank in found:
        assert_same(rank["weights"], alone["weights"], 1e-12)


@pytest.mark.parametrize("head", ["policy", "value"])
@pytest.mark.parametrize("size", SIZES)
def test_the_gradient_does_not_depend_on_micro_batches(tiny: str, ranks: Ranks, size: int, head: str) -> None:
    options = with_size({"head": head}, size, **DOUBLE)
    alone = jobs.one_gradient(tiny, {"fsdp": DOUBLE, "head": head}, jobs.ROWS, head == "policy")
    assert max(gradient.abs().max() for gradient in alone.values()) > 1e-2
    for cuts in ranks.run(jobs.cut_gradients, tiny, options, (1, 2), head == "policy"):
        for found in cuts:
            assert_same(found, alone, 1e-12)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("size", SIZES)
def test_other_precisions_are_within_rounding(tiny: str, ranks: Ranks, size: int, dtype: str) -> None:
    """Gradients, because Adam's first steps are signs: rounding of a tiny gradient moves a weight visibly."""
    plain = ranks.run(jobs.one_gradient, tiny, {"fsdp": {"dtype": dtype}}, 1)[0]
    for found in ranks.run(jobs.one_gradient, tiny, with_size({}, size, dtype=dtype), 1):
        assert_same(found, plain, 1e-6)


def test_all_ranks_as_one_copy_is_plain_fsdp_bit_by_bit(tiny: str, ranks: Ranks) -> None:
    plain = ranks.run(jobs.train, tiny, {})
    for found, wanted in zip(ranks.run(jobs.train, tiny, with_size({}, RANKS)), plain, strict=True):
        assert found["reported"] == wanted["reported"]
        assert_same(found["weights"], wanted["weights"], 0.0)


def test_gradients_are_summed_over_copies_once(tiny: str, ranks: Ranks) -> None:
    units = 3  # two layers and the root
    for one, two in ranks.run(jobs.count_reductions, tiny, 2, with_size({}, 2)):
        assert one == two == {jobs.SCATTERED: units, jobs.REDUCED: units + 1}, "and one for the norm"


@pytest.mark.parametrize("size", SIZES)
def test_a_norm_that_is_not_finite_skips_the_step_on_all_ranks(tiny: str, ranks: Ranks, size: int) -> None:
    for reported, moved, _ in ranks.run(jobs.break_one_rank, tiny, with_size({}, size)):
        assert reported["skipped"] == 1.0 and not moved


@pytest.mark.parametrize("options", [{}, {"model": {"lora_rank": 2, "target_modules": "all-linear"}}])
@pytest.mark.parametrize("size", SIZES)
def test_weights_for_one_rank_have_values_there_alone(
    tiny: str, ranks: Ranks, size: int, options: dict[str, Any]
) -> None:
    receivers = (None, 0, 3)
    sent = ranks.run(jobs.weights_to, tiny, with_size(options, size), receivers)
    assert_sent(sent, receivers, sent[0][0])


def test_a_rank_holds_its_shard_of_one_copy(tiny: str, ranks: Ranks) -> None:
    whole = jobs.held_bytes(tiny, {})["weights"]
    for size in (1, 2, 4):
        found = ranks.run(jobs.held_bytes, tiny, with_size({}, size))
        for name, times in (("weights", 1), ("gradients", 1), ("moments", 2)):
            assert sum(rank[name] for rank in found[:size]) == times * whole, "the first ranks are a copy"
            assert sum(rank[name] for rank in found) == times * whole * RANKS // size
        assert sum(rank["stored"] for rank in found) == 3 * whole, "copies are stored once"


OOM_LAYOUTS: dict[str, dict[str, Any]] = {
    "two_copies": {"fsdp_size": 2},
    "four_copies": {"fsdp_size": 1},
    "kept_gathered": {"fsdp_size": 2, "reshard_after_forward": False},
    "offload_policy": {"fsdp_size": 2, "offload_policy": True},
}


@pytest.mark.parametrize("layout", OOM_LAYOUTS)
def test_memory_that_runs_out_on_some_ranks_leaves_no_trace(tiny: str, ranks: Ranks, layout: str) -> None:
    """Every place, in the first or the last pass: on one rank, on both of a copy, on one of each copy. Every
    place in both: test_out_of_memory.py."""
    cases = oom_jobs.cases_of_four_ranks()
    options = {"fsdp": {**DOUBLE, **OOM_LAYOUTS[layout]}}
    some = cases if layout == "two_copies" else cases[::3]
    for wrong in ranks.run(oom_jobs.disturbed, tiny, options, some):
        assert wrong == []
