"""What a step's metrics say of its time and traffic, by hand."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from trainer.test_bypass import make_trainer

from hydraflow.dispatch.transport import Traffic
from hydraflow.schema import PPOConfig
from hydraflow.workers.advantage import RolloutComparison


def traffic(sent: int, received: int, **seconds: float) -> Traffic:
    """The rollout has a second replica, which works for half as long beside the first."""
    worked = {(role, 0): of_role for role, of_role in seconds.items()} | {
        ("rollout", 1): seconds["rollout"] / 2
    }
    return Traffic(sent=sent, received=received, worked=defaultdict(float, worked))


@pytest.mark.parametrize(("reward", "dispatch"), [(1.0, 0.125), (4.0, 0.0)], ids=["in turn", "at a time"])
def test_shares_of_a_step(reward: float, dispatch: float) -> None:
    """A step of 8 s: the rollout works for 2 s of it, the actor for 4 s; the reward function, which earlier
    steps did not need, at most beside them. The warm start's role is no role of the run."""
    trainer, _ = make_trainer(PPOConfig(), RolloutComparison({}, {}, {}))
    before = traffic(100, 50, actor=3.0, rollout=1.0, sft=9.0)
    now = traffic(900, 250, actor=7.0, rollout=3.0, sft=9.0, reward=reward)
    runtime: Any = trainer.runtime
    runtime.traffic = lambda: now
    runtime.groups = [SimpleNamespace(roles=roles) for roles in (["actor", "rollout"], ["reward"])]
    found = trainer._throughput(tokens=1600, rows=10, seconds={"timing_s/step": 8.0}, before=before)
    assert found == {
        "timing_s/step": 8.0,
        "perf/total_num_tokens": 1600,
        "perf/time_per_step": 8.0,
        "perf/throughput": 200 / trainer.plan.rollout_devices,
        "perf/dispatch_share": dispatch,
        "perf/controller_bytes_per_trajectory": 100,
        "perf/idle_share/actor": 0.5,
        "perf/idle_share/rollout": 0.75,
        "perf/idle_share/reward": 1 - reward / 8,
    }
