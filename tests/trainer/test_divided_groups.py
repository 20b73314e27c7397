"""The trainer divides the samples of a prompt among ranks, by the lengths that its batch has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hydraflow.batch_plan.resolve import resolve_plan
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.remote import RemoteBatch, materialise
from hydraflow.schema import PPOConfig
from hydraflow.trainer.ppo import PPOTrainer


@pytest.mark.parametrize(
    ("columns", "of_first_rank"),
    [
        ({"prompt_lengths": torch.full((4,), 1)}, [0, 1]),  # a group on both ranks: 9 + 2 tokens on each
        ({"prompt_lengths": torch.full((4,), 7)}, [0, 0]),  # one on each: 15 + 7 and 3 + 7
        ({}, [0, 0]),  # a source of trajectories may lack the column
    ],
)
def test_where_that_leaves_the_longest_rank_fewer_tokens(
    columns: dict[str, torch.Tensor], of_first_rank: list[int]
) -> None:
    config = PPOConfig()
    config.trainer.device, config.trainer.n_gpus_per_node = "cpu", 2
    config.data.train_batch_size = config.actor_rollout_ref.actor.ppo_mini_batch_size = 2
    config.actor_rollout_ref.rollout.n = 2
    plan = resolve_plan(config, prompts=None)
    runtime: Any = SimpleNamespace(
        timeline=None, device_type="cpu", fetch=lambda batch: materialise(batch, lambda refs: [])
    )
    trainer = PPOTrainer(config, plan, SimpleNamespace(), runtime, SimpleNamespace(), None)  # type: ignore[arg-type]
    lengths = torch.tensor([7, 8, 2, 1]) + columns.get("prompt_lengths", torch.ones(4))
    batch = RemoteBatch.from_local(
        DataProto.from_dict({"lengths": lengths, "group": torch.tensor([0, 0, 1, 1]), **columns})
    )
    found = materialise(trainer.mini_batched(batch, ["group"], plan.actor, 1), lambda refs: [])
    assert sorted(found.get("group").tolist()[:2]) == of_first_rank
