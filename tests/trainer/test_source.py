"""Which random draws the prompts of a step get from `Lockstep`: those of their epoch, whatever the step; and
when a reward model is called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from data.test_loader import loader, numbers

from hydraflow.batch_plan.layout import Devices
from hydraflow.data.loader import PromptLoader
from hydraflow.dispatch.shards import CompletedFuture, Future
from hydraflow.generation.config import SamplingConfig
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.ragged import from_rows
from hydraflow.protocol.remote import RemoteBatch
from hydraflow.trainer.source import Lockstep, Sampler
from hydraflow.trainer.turns import EngineRole, Turns
from hydraflow.workers.rollout import SamplingSpec

Asked = list[tuple[list[int], int]]
"""Prompts and visit of each call of the sampler."""


def lockstep(prompts: PromptLoader, asked: Asked, **more: int) -> Lockstep:
    def sample(batch: DataProto, visit: int) -> None:
        asked.append((numbers(batch), visit))

    sampler: Any = SimpleNamespace(sample=sample)
    return Lockstep(prompts, sampler, **more)


def test_the_visit_is_the_epoch_of_the_prompts_whatever_the_step() -> None:
    """Six prompts, three a step; a step that was abandoned, and a resumed run, get the same again."""
    asked: Asked = []
    source = lockstep(loader(rows=6), asked)
    for step in (5, 6, 9, 10):
        before = source.state()
        source.take(step)
    assert [visit for _, visit in asked] == [0, 0, 1, 1]
    assert sorted(asked[0][0] + asked[1][0]) == sorted(asked[2][0] + asked[3][0]) == list(range(6))
    source.give_back()
    source.take(10)
    resumed = lockstep(loader(rows=6), asked)
    resumed.load_state(before)
    resumed.take(1)
    assert asked[3] == asked[4] == asked[5]


def test_held_out_prompts_have_a_visit_of_their_own() -> None:
    asked: Asked = []
    source = lockstep(loader(rows=6, shuffle=False), asked, visit=-1)
    for _ in range(3):
        source.take(0)
    assert asked == [([0, 1, 2], -1), ([3, 4, 5], -1), ([0, 1, 2], -1)]


@pytest.mark.parametrize(("device", "at_once"), [(1, True), (0, False)], ids=["its own", "the rollout's"])
def test_a_reward_model_scores_at_once_unless_it_needs_the_rollouts_device(
    device: int, at_once: bool
) -> None:
    """Then it is called once, for the caller that asks first, when the rollout's turn is over."""
    calls: list[str] = []
    rows = DataProto.from_dict({name: from_rows([torch.ones(2)] * 6) for name in ("prompts", "responses")})

    def sampled(*_: object) -> Future:
        calls.append("rollout")
        return CompletedFuture(RemoteBatch.from_local(rows))

    def scores(_: RemoteBatch) -> Future:
        calls.append("reward_model")
        return CompletedFuture(RemoteBatch.from_local(DataProto.from_dict({"score": torch.ones(6)})))

    def role(name: str, where: int) -> Any:
        spec = SimpleNamespace(args=(SimpleNamespace(model_parallel=1),))
        group = SimpleNamespace(roles={name: spec})
        found: Any = SimpleNamespace(name=name, world_size=1, group=group, call=sampled)
        turns.add(found, Devices.of([range(where, where + 1)]), EngineRole(found))
        return found

    turns = Turns()
    engine, _ = role("rollout", 0), role("reward_model", device)
    how = SamplingSpec.of_training(SamplingConfig(), 2)
    uids = {"uid": np.array(["a", "b", "c"], dtype=object)}
    prompts = DataProto.from_dict({"prompts": from_rows([torch.ones(2)] * 3)}, non_tensors=uids)
    taken = Sampler(engine, None, how, turns=turns, model=scores).sample(prompts, 0)
    assert calls == ["rollout", "reward_model"][: 1 + at_once]
    for _ in range(2):
        assert len(taken.scoring.get()) == 6
    assert calls == ["rollout", "reward_model"]
