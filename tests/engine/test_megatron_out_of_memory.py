"""Memory that runs out in the middle of a pass on Megatron-Core, on one rank or on both: all hear of it,
nothing of the pass is left, nobody waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine import megatron_oom_jobs as jobs
from engine.megatron_models import GROUPED, sizes
from engine.oom_jobs import cases_of_two_ranks
from engine.pool import Ranks
from transformers import MixtralConfig, Qwen2Config

FAMILIES = {
    "qwen2": Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
}
LAYOUTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "usual": ("qwen2", sizes(), True),
    "plain optimizer": ("qwen2", sizes(use_distributed_optimizer=False), True),
    "activations are kept": ("qwen2", sizes(), False),
    "experts": ("mixtral", sizes(), True),
    "everything rests": (
        "qwen2",
        sizes(param_offload=True, grad_offload=True, optimizer_offload=True),
        True,
    ),
}
"""Family, settings, and whether activations are computed again."""
GROUP_SIZES = (2,)
CASES = cases_of_two_ranks(jobs.PLACES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_comes_next_is_as_if_nothing_had_happened(ranks: Ranks, models: Path, layout: str) -> None:
    family, settings, again = LAYOUTS[layout]
    options = {"megatron": settings, "model": {"enable_gradient_checkpointing": again}}
    for wrong in ranks.run(jobs.disturbed, str(models / family), options, CASES):
        assert wrong == []


def test_in_a_forward_pass(ranks: Ranks, models: Path) -> None:
    cases = [case for case in CASES if case.place in ("pack", "layer")]
    for wrong in ranks.run(jobs.disturbed_inference, str(models / "qwen2"), {"megatron": sizes()}, cases):
        assert wrong == []


def test_in_the_reduction_of_gradients(ranks: Ranks, models: Path) -> None:
    """The others are in the reduction by then: the rank reports nothing, and the run ends."""
    said = ranks.run(jobs.interrupted_reduction, str(models / "qwen2"), {"megatron": sizes()})
    assert said == ["", "OutOfMemoryError"]


def test_ranks_that_divide_a_model_raise_what_they_met(ranks: Ranks, models: Path) -> None:
    """Nothing that the others wait for could be sent in its place: the run ends."""
    said = ranks.run(jobs.divided, str(models / "qwen2"), {"megatron": sizes(2)})
    assert said == ["RuntimeError", "OutOfMemoryError"]
