"""A plan takes no longer for more devices or more prompts. Counted in lines that run, because a clock would
depend on the machine; `scripts/bench/plan_scale.py` prints milliseconds.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from batch_plan.overrides import refusal

POLICY = "actor_rollout_ref"


def machines(nodes: int, **changed: Any) -> dict[str, Any]:
    """Mixture-of-experts training with tp 4, pp 2, ep 8 on that many machines with 8 devices; the step grows
    with them."""
    sizes = {"tensor_model": 4, "pipeline_model": 2, "expert_model": 8, "expert_tensor": 1}
    return {
        "trainer.nnodes": nodes,
        "trainer.n_gpus_per_node": 8,
        "algorithm.adv_estimator": "grpo",
        "data.train_batch_size": 2 * nodes,
        f"{POLICY}.actor.ppo_mini_batch_size": changed.get("mini", nodes),
        f"{POLICY}.actor.ppo_micro_batch_size_per_gpu": changed.get("micro", 4),
        f"{POLICY}.actor.strategy": "megatron",
        f"{POLICY}.rollout.name": "vllm",
        f"{POLICY}.rollout.n": 16,
        f"{POLICY}.rollout.tensor_model_parallel_size": 8,
    } | {f"{POLICY}.actor.megatron.{name}_parallel_size": size for name, size in sizes.items()}


def lines_run(settings: dict[str, Any], prompts: int) -> tuple[int, int]:
    """Lines that judging runs, turns of a loop counted each; and the number of problems."""
    count = 0

    def trace(_frame: FrameType, _event: str, _argument: object) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        problems = refusal(settings, prompts=prompts)
    finally:
        sys.settrace(before)
    return count, len(problems)


@pytest.mark.parametrize(("changed", "problems", "most"), [({}, 0, 1.2), ({"mini": 7, "micro": 3}, 2, 8.0)])
def test_the_work_does_not_grow_with_the_cluster(changed: dict[str, Any], problems: int, most: float) -> None:
    """100,000 devices and 10 million prompts against 16 and 1000; a search for remedies looks at divisors,
    whose search grows."""
    small, large = lines_run(machines(2, **changed), 1000), lines_run(machines(12_500, **changed), 10_000_000)
    assert small[1] == large[1] == problems
    assert large[0] < most * small[0]
    assert large[0] < 2_000_000
