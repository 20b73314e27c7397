"""When the actor computes log-probabilities before its update: not with `rollout_correction.bypass_mode`, and
always for an adaptive entropy bonus."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hydraflow.algorithms.config import OldFrom
from hydraflow.batch_plan.resolve import resolve_plan
from hydraflow.errors import GuardStop
from hydraflow.metrics import mean
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.remote import RemoteBatch
from hydraflow.schema import PPOConfig
from hydraflow.trainer.clock import GracePeriodOver
from hydraflow.trainer.ppo import PPOTrainer
from hydraflow.trainer.source import Trajectories
from hydraflow.workers.actor import ActorWorker
from hydraflow.workers.advantage import RolloutComparison

COLUMNS = ("prompts", "responses", "response_mask", "rollout_log_probs", "replica", "group", "versions")


def take(*, replayed: bool = False) -> Trajectories:
    rows = RemoteBatch.from_local(DataProto.from_dict({name: torch.zeros(2) for name in COLUMNS}))
    return Trajectories(rows, SimpleNamespace(), replayed=replayed)  # type: ignore[arg-type]


def make_trainer(config: PPOConfig, compared: RolloutComparison) -> tuple[PPOTrainer, list[RemoteBatch]]:
    """A trainer whose actor computes ones, and the passes that it has made."""
    passes: list[RemoteBatch] = []
    ours = {name: torch.ones(2) for name in ("old_log_probs", "entropys")}

    def compute(method: Any, batch: RemoteBatch) -> RemoteBatch:
        assert method is ActorWorker.compute_log_prob
        passes.append(batch)
        return RemoteBatch.from_local(DataProto.from_dict(ours))

    known = DataProto.from_dict({name: torch.zeros(2) for name in ("group", "versions")})
    roles: Any = SimpleNamespace(
        actor=SimpleNamespace(call=compute), advantage=SimpleNamespace(call=lambda *_: compared)
    )
    runtime: Any = SimpleNamespace(timeline=None, device_type="cpu", fetch=lambda _: known)
    plan, source = resolve_plan(config, prompts=None), SimpleNamespace()
    trainer = PPOTrainer(config, plan, roles, runtime, source, None)  # type: ignore[arg-type]
    trainer.exact = False
    return trainer, passes


@pytest.mark.parametrize("bypass", [False, True])
def test_no_pass_of_the_trainer_is_made_after_the_first_comparison(bypass: bool) -> None:
    config, compared = PPOConfig(), RolloutComparison({}, {}, {0: 0.0})
    config.algorithm.rollout_correction.bypass_mode = bypass
    trainer, passes = make_trainer(config, compared)
    for step in (1, 2, 3):
        batch = trainer.old_log_probs(take(), step)
        assert (trainer.old == OldFrom.ROLLOUT) == bypass
        if bypass:
            assert batch.columns["old_log_probs"] is batch.columns["rollout_log_probs"]
    assert len(passes) == (1 if bypass else 3)
    compared.by_replica[0] = 1.0  # far off, but the run that sampled it may have had other weights
    trainer.old_log_probs(take(replayed=True), 4)
    assert (trainer.old == OldFrom.ROLLOUT) == bypass


@pytest.mark.parametrize("bypass", [False, True])
def test_an_adaptive_entropy_bonus_has_a_pass_in_every_step(bypass: bool) -> None:
    """It starts at 0, and goes on where a checkpoint left it."""
    config, measured = PPOConfig(), {"actor/entropy": 0.1}
    config.algorithm.rollout_correction.bypass_mode = bypass
    adaptive = config.actor_rollout_ref.actor.adaptive_entropy
    adaptive.enabled, adaptive.delta_ent_coef, adaptive.max_ent_coef = True, 0.25, 10.0
    trainer, passes = make_trainer(config, RolloutComparison(measured, {}, {0: 0.0}))
    used, updated = [], {"actor/entropy": mean(0.7), "actor/grad_norm": mean(1.0)}
    updating: Any = SimpleNamespace(get=lambda: updated)
    for step in (1, 2, 3):
        trainer.old_log_probs(take(), step)
        used.append(trainer.metrics["actor/entropy_coeff"])
        assert trainer.entropy_coeff == used[-1]
        trainer.note_update(updating)
        found = trainer.metrics["actor/entropy"], trainer.metrics["actor/grad_norm"]
        assert found == (0.1, 1.0), "the entropy that the controller has seen"
    assert used == [0.0, 0.25, 0.5] and len(passes) == 3
    resumed, _ = make_trainer(config, RolloutComparison(measured, {}, {0: 0.0}))
    resumed.restore(trainer.controllers()["entropy"])
    resumed.old_log_probs(take(), 4)
    assert resumed.entropy_coeff == 0.75
    assert (resumed.old == OldFrom.ROLLOUT) == bypass
    measured.clear()  # nothing is trained on
    resumed.old_log_probs(take(), 5)
    assert resumed.controllers()["entropy"] == {"value": 1.0}


def test_an_abandoned_step_leaves_the_entropy_controller_alone() -> None:
    """A checkpoint of the step before follows, and the resumed run repeats the step."""
    config, measured = PPOConfig(), {"actor/entropy": 0.1}
    adaptive = config.actor_rollout_ref.actor.adaptive_entropy
    adaptive.enabled, adaptive.delta_ent_coef, adaptive.max_ent_coef = True, 0.25, 10.0
    trainer, _ = make_trainer(config, RolloutComparison(measured, {}, {0: 0.0}))
    trainer.old_log_probs(take(), 1)
    runtime: Any = trainer.runtime
    runtime.traffic, runtime.interruptible = lambda: None, lambda interrupt: nullcontext()
    trainer.timer = SimpleNamespace(phase=lambda *_, **__: nullcontext())  # type: ignore[assignment]

    def abandoned(*_: Any) -> None:
        trainer.old_log_probs(take(), 2)
        raise GracePeriodOver

    trainer.source.take = abandoned  # type: ignore[assignment]
    with pytest.raises(GracePeriodOver):
        trainer.step(2, lambda: None)
    assert trainer.controllers()["entropy"] == {"value": 0.25}


def test_the_worst_of_several_processes_is_named_and_the_first_weight_in_which_it_differs() -> None:
    compared = RolloutComparison({}, {}, {0: 0.01, 1: 0.3, 2: 0.2})
    trainer, _ = make_trainer(PPOConfig(), compared)
    trainer.roles.rollout = SimpleNamespace(world_size=3)  # type: ignore[assignment]
    link: Any = SimpleNamespace(first_difference=lambda replica: f"a weight of replica {replica}")
    trainer.roles.link = link
    said = r"^generation replica 1 and .* by 0\.3000 on average, .* trainer's: a weight of replica 1\.$"
    with pytest.raises(GuardStop, match=said):
        trainer.old_log_probs(take(), 1)


def test_a_batch_without_a_trained_token_is_no_comparison() -> None:
    """With one optimizer step, passes end once there has been one."""
    config, compared = PPOConfig(), RolloutComparison({}, {}, {})
    config.data.train_batch_size = config.actor_rollout_ref.actor.ppo_mini_batch_size = 8
    trainer, passes = make_trainer(config, compared)
    trainer.old_log_probs(take(), 1)
    compared.by_replica[0] = 0.0
    for step in (2, 3, 4):
        trainer.old_log_probs(take(), step)
    assert len(passes) == 2 and trainer.old == OldFrom.FIRST_PASS
