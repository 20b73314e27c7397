"""The batch plan's numbers are those of the passes that run, on both engines and however a model is
divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from batch_plan.plans import configured
from engine import planned_jobs as jobs
from engine.megatron_models import GROUPED, sizes
from engine.pool import Ranks
from transformers import Qwen2Config

from hydraflow.batch_plan.resolve import BatchPlan, resolve_plan
from hydraflow.engine.config import MegatronConfig
from hydraflow.schema import PPOConfig

FAMILIES = {str(layers): Qwen2Config(**GROUPED | dict(num_hidden_layers=layers)) for layers in (2, 4)}
"""Of two layers, and of four for stages of two parts."""
RANKS = 4
GROUP_SIZES = (RANKS,)
PARTS = {"virtual_pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any] | None] = {
    "fsdp2": None,
    "tp 2": sizes(2),
    "pp 2": sizes(1, 2),
    "pp 2, two parts": sizes(1, 2, **PARTS),
    "tp 2, pp 2": sizes(2, 2),
}
"""Settings of Megatron."""


def planned(models: Path, settings: dict[str, Any] | None, **others: Any) -> tuple[PPOConfig, BatchPlan]:
    """Two optimizer steps on four devices."""
    layers = 2 * parts_of(settings)
    config = configured(
        data__train_batch_size=16,
        rollout__n=2,
        actor__ppo_mini_batch_size=8,
        algorithm__adv_estimator="grpo",
        actor__strategy="fsdp2" if settings is None else "megatron",
        actor__megatron=MegatronConfig(dtype="fp32", **settings or {}),
        trainer__n_gpus_per_node=4,
        **others,
    )
    config.actor_rollout_ref.model.path = str(models / str(layers))
    return config, resolve_plan(config, prompts=None)


def parts_of(settings: dict[str, Any] | None) -> int:
    """Of each stage."""
    return (settings or {}).get("virtual_pipeline_model_parallel_size", 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_ran_is_what_was_planned(ranks: Ranks, models: Path, layout: str) -> None:
    """Data ranks, optimizer steps, their rows per rank, and the number of micro-batches and their rows."""
    sizes = dict(actor__ppo_micro_batch_size_per_gpu=2, rollout__log_prob_micro_batch_size_per_gpu=4)
    config, plan = planned(models, LAYOUTS[layout], **sizes)
    role = plan.actor
    assert (role.optimizer_steps_per_step, role.mini_batch_trajectories) == (2, 16)
    for found in ranks.run(jobs.train, config, plan):
        assert found["ranks"] == role.data_ranks
        assert len(found["updates"]) == role.optimizer_steps_per_step
        for micro_batches, runs in zip(found["updates"], found["runs"], strict=True):
            assert sum(micro_batches) == role.rows_per_rank
            assert micro_batches == [role.micro.rows] * (role.accumulation_steps or 0)
            assert runs == role.accumulation_steps
        assert set(found["forward"]) == {plan.old_log_prob.rows}
        assert sum(found["forward"]) * role.data_ranks == plan.trajectories_per_step


@pytest.mark.parametrize("layout", LAYOUTS)
def test_micro_batches_filled_by_tokens(ranks: Ranks, models: Path, layout: str) -> None:
    """None is over the budget, data ranks have as many of them in each update, and an interleaved schedule of
    two stages runs an even number."""
    lengths = dict(data__max_prompt_length=8, data__max_response_length=12)
    budget = dict(actor__use_dynamic_bsz=True, actor__ppo_max_token_len_per_gpu=20)
    config, plan = planned(models, LAYOUTS[layout], **lengths, **budget)
    found = ranks.run(jobs.train, config, plan)
    assert plan.actor.micro.max_tokens == 20
    multiple = parts_of(LAYOUTS[layout])
    for rank in found:
        assert [len(update) for update in rank["updates"]] == [len(update) for update in found[0]["updates"]]
        assert min(map(len, rank["tokens"])) > 1 and max(map(max, rank["tokens"])) <= 20
        for rows, runs in zip(rank["updates"], rank["runs"], strict=True):
            assert sum(rows) == plan.actor.rows_per_rank
            assert runs == -(-len(rows) // multiple) * multiple
