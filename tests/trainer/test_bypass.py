"""With `rollout_correction.bypass_mode` the old log-probabilities are the generation engine's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hydraflow.algorithms.config import OldFrom
from hydraflow.batch_plan.resolve import resolve_plan
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.remote import RemoteBatch
from hydraflow.schema import PPOConfig
from hydraflow.trainer.ppo import PPOTrainer
from hydraflow.trainer.source import Trajectories
from hydraflow.workers.actor import ActorWorker
from hydraflow.workers.advantage import RolloutComparison

COLUMNS = ("prompts", "responses", "response_mask", "rollout_log_probs", "replica", "group", "versions")


def take(*, replayed: bool = False) -> Trajectories:
    rows = RemoteBatch.from_local(DataProto.from_dict({name: torch.zeros(2) for name in COLUMNS}))
    return Trajectories(rows, SimpleNamespace(), replayed=replayed)  # type: ignore[arg-type]


@pytest.mark.parametrize("bypass", [False, True])
def test_no_pass_of_the_trainer_is_made_after_the_first_comparison(bypass: bool) -> None:
    config, passes = PPOConfig(), []
    config.algorithm.rollout_correction.bypass_mode = bypass
    ours = {name: torch.ones(2) for name in ("old_log_probs", "entropys")}

    def compute(method: Any, batch: RemoteBatch) -> RemoteBatch:
        assert method is ActorWorker.compute_log_prob
        passes.append(batch)
        return RemoteBatch.from_local(DataProto.from_dict(ours))

    compared = RolloutComparison({}, {}, {0: 0.0})
    known = DataProto.from_dict({name: torch.zeros(2) for name in ("group", "versions")})
    roles: Any = SimpleNamespace(
        actor=SimpleNamespace(call=compute), advantage=SimpleNamespace(call=lambda *_: compared)
    )
    runtime: Any = SimpleNamespace(timeline=None, device_type="cpu", fetch=lambda _: known)
    plan, source = resolve_plan(config, prompts=None), SimpleNamespace()
    trainer = PPOTrainer(config, plan, roles, runtime, source, None)  # type: ignore[arg-type]
    trainer.exact = False
    for step in (1, 2, 3):
        batch = trainer.old_log_probs(take(), step)
        assert (trainer.old == OldFrom.ROLLOUT) == bypass
        if bypass:
            assert batch.columns["old_log_probs"] is batch.columns["rollout_log_probs"]
    assert len(passes) == (1 if bypass else 3)
    compared.by_replica[0] = 1.0  # far off, but the run that sampled it may have had other weights
    trainer.old_log_probs(take(replayed=True), 4)
    assert (trainer.old == OldFrom.ROLLOUT) == bypass
