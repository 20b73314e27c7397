"""Which mini-batches take an optimizer step, without an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from workers.ragged_jobs import plan_of

from hydraflow.batch_plan.parts import MicroPlan
from hydraflow.engine.micro_batcher import MicroBatcher
from hydraflow.models.ask import LOG_PROBS
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.workers.skipping import SkipGuard, SkipLimits
from hydraflow.workers.training import Change, Learner, UpdateLoss


class CountingEngine:
    """Counts passes, optimizer steps and steps of the schedule."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def reduce(self, sums: torch.Tensor) -> torch.Tensor:
        return sums

    def forward_backward_rows(self, *_: Any) -> dict[str, Any]:
        self.calls.append("pass")
        return {}

    def optimizer_step(self) -> dict[str, float]:
        self.calls.append("step")
        return {"grad_norm": 1.0, "lr": 0.1, "skipped": 0.0}

    def lr_step(self) -> None:
        self.calls.append("schedule")


@pytest.mark.parametrize("changes", [[], [lambda rows: (rows, {})]])
def test_a_mini_batch_without_a_trained_token_takes_no_step(changes: list[Change]) -> None:
    """Momentum and weight decay would change the weights."""
    engine: Any = CountingEngine()
    masks = [[1, 1], [1, 0], [0, 0], [0, 0]]
    columns = {"response_mask": ragged.from_rows([torch.tensor(mask) for mask in masks])}
    micro, unused = MicroPlan(rows=2, max_tokens=None), lambda *_: None
    plan, guard = replace(plan_of(1, 2, micro), rows_per_rank=2), SkipGuard(SkipLimits(), "actor", 0)
    learner = Learner(engine, plan, MicroBatcher(micro, "test"), guard, "actor")
    metrics = learner.learn(DataProto.from_dict(columns), UpdateLoss(unused, LOG_PROBS, changes), step=1)  # type: ignore[arg-type]
    assert engine.calls == ["pass", "step", "schedule"]
    assert metrics["actor/grad_norm"].value == 1.0
