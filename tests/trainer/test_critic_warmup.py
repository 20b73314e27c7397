"""When the actor starts to learn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hydraflow.batch_plan.parts import RolePlan
from hydraflow.batch_plan.resolve import resolve_plan
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.remote import RemoteBatch
from hydraflow.schema import PPOConfig
from hydraflow.trainer.ppo import PPOTrainer


@pytest.mark.parametrize(("warmup", "first"), [(0, 1), (1, 1), (2, 2), (10, 10)])
def test_the_actor_learns_from_step_critic_warmup_on(
    warmup: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl: `if self.config.trainer.critic_warmup <= self.global_steps: update the actor`."""
    config = PPOConfig()
    config.trainer.critic_warmup = warmup
    plan = resolve_plan(config, prompts=None)
    roles: Any = SimpleNamespace(actor=SimpleNamespace(call=lambda method, inputs, step: step))
    runtime: Any = SimpleNamespace(timeline=None, device_type="cpu")
    trainer = PPOTrainer(config, plan, roles, runtime, SimpleNamespace(), None)  # type: ignore[arg-type]
    given: list[RolePlan] = []
    batch = RemoteBatch.from_local(DataProto.from_dict({"lengths": torch.ones(1)}))
    monkeypatch.setattr(trainer, "mini_batched", lambda batch, names, plan, step: given.append(plan) or batch)
    learned = [step for step in range(1, 13) if trainer.update_actor(batch, step) is not None]
    assert learned == list(range(first, 13))
    assert given == [plan.actor] * len(learned)
