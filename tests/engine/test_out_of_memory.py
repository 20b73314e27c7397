"""Memory that runs out in the middle of a pass, on one rank or on both: all hear of it, nothing of the pass
is left, nobody waits."""

from __future__ import annotations

from typing import Any

import pytest
from engine import oom_jobs as jobs
from engine.alike import assert_same
from engine.pool import Ranks

from hydraflow.engine.config import WrapPolicyConfig

DOUBLE = {"model_dtype": "fp64", "dtype": "fp64"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "usual": {"fsdp": DOUBLE},
    "kept_weights": {"fsdp": {**DOUBLE, "reshard_after_forward": False}},
    "one_unit": {"fsdp": {**DOUBLE, "wrap_policy": WrapPolicyConfig(min_num_params=10**6)}},
    "param_offload": {"fsdp": {**DOUBLE, "param_offload": True}},
    "offload_policy": {"fsdp": {**DOUBLE, "offload_policy": True}},
    "no_checkpointing": {"fsdp": DOUBLE, "model": {"enable_gradient_checkpointing": False}},
    "adapters": {"fsdp": DOUBLE, "model": {"lora_rank": 2}},
    "value": {"fsdp": DOUBLE, "head": "value"},
}
ALL = jobs.cases_of_two_ranks(jobs.PLACES)
SOME = ALL[::3]
UNREACHED = {"value": ("head", "head_backward"), "adapters": ("embed_backward",)}
"""A value model has another head, and below the first adapters there is no gradient."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_comes_next_is_as_if_nothing_had_happened(tiny: str, ranks: Ranks, layout: str) -> None:
    unreached = UNREACHED.get(layout, ())
    cases = ALL if layout == "usual" else [case for case in SOME if case.place not in unreached]
    for wrong in ranks.run(jobs.disturbed, tiny, LAYOUTS[layout], cases):
        assert wrong == []


def test_the_gradient_is_that_of_whole_micro_batches(tiny: str, ranks: Ranks) -> None:
    for whole, halved in ranks.run(jobs.gradient_after_out_of_memory, tiny, LAYOUTS["usual"]):
        assert max(float(value.abs().max()) for value in whole.values()) > 1e-2
        assert_same(halved, whole, 1e-12)


def test_a_rank_alone(tiny: str) -> None:
    assert (
        jobs.disturbed(tiny, LAYOUTS["usual"], [jobs.Case(case.place, (0,), case.at) for case in SOME]) == []
    )


def test_in_a_forward_pass(tiny: str, ranks: Ranks) -> None:
    cases = [
        jobs.Case(place, short, at)
        for place in ("pack", "embed", "layer", "head")
        for short in ((0,), (1,), (0, 1))
        for at in (0, 1)
    ]
    for wrong in ranks.run(jobs.disturbed_inference, tiny, cases):
        assert wrong == []


@pytest.mark.parametrize("layout", ["usual", "kept_weights", "offload_policy", "mixed precision"])
def test_another_error_leaves_the_gradient_as_it_was(tiny: str, layout: str) -> None:
    mixed = {"fsdp": {"dtype": "bf16"}}
    assert jobs.after_errors(tiny, LAYOUTS.get(layout, mixed), jobs.PLACES) == []


def test_another_error_on_two_ranks(tiny: str, ranks: Ranks) -> None:
    for wrong in ranks.run(jobs.after_errors, tiny, LAYOUTS["usual"], ["loss", "layer_backward"]):
        assert wrong == []
