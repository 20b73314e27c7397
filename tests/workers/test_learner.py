"""Which mini-batches take an optimizer step, and the metrics of those that do, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from workers.ragged_jobs import plan_of

from hydraflow.algorithms.aggregate import Denominators
from hydraflow.batch_plan.parts import MicroPlan
from hydraflow.engine.micro_batcher import MicroBatcher
from hydraflow.metrics import Metric, summed, values
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.workers.skipping import SkipGuard, SkipLimits
from hydraflow.workers.training import Change, Learner, UpdateLoss


class CountingEngine:
    """Counts passes, optimizer steps and steps of the schedule."""

    def __init__(self, norms: Sequence[float] = (1.0,) * 4, skipped: float = 0.0) -> None:
        self.calls: list[str] = []
        self.norms, self.skipped = iter(norms), skipped

    def reduce(self, sums: torch.Tensor) -> torch.Tensor:
        return sums

    def forward_backward_rows(self, *_: Any) -> dict[str, Metric]:
        self.calls.append("pass")
        return {"actor/pg_loss": summed(3.0 + len(self.calls))}

    def optimizer_step(self) -> dict[str, float]:
        self.calls.append("step")
        return {"grad_norm": next(self.norms), "lr": 0.1, "skipped": self.skipped}

    def lr_step(self) -> None:
        self.calls.append("schedule")


def learn(
    engine: Any, masks: list[list[int]], changes: Sequence[Change] = (), make: Any = None, epochs: int = 1
) -> dict[str, float]:
    """Metrics of mini-batches of two rows each."""
    columns = {"response_mask": ragged.from_rows([torch.tensor(mask) for mask in masks])}
    micro = MicroPlan(rows=2, max_tokens=None)
    plan = replace(plan_of(1, 2, micro), rows_per_rank=2, epochs=epochs)
    learner = Learner(engine, plan, MicroBatcher(micro, "test"), SkipGuard(SkipLimits(), "actor", 0), "actor")
    loss = UpdateLoss(make or (lambda *_: None), changes=changes)
    return values(learner.learn(DataProto.from_dict(columns), loss, step=1))


@pytest.mark.parametrize("changes", [[], [lambda rows: (rows, {})]])
def test_a_mini_batch_without_a_trained_token_takes_no_step(changes: list[Change]) -> None:
    """Momentum and weight decay would change the weights."""
    engine = CountingEngine()
    metrics = learn(engine, [[1, 1], [1, 0], [0, 0], [0, 0]], changes)
    assert engine.calls == ["pass", "step", "schedule"]
    assert metrics["actor/grad_norm"] == 1.0


@pytest.mark.parametrize("changes", [[], [lambda rows: (rows, {"actor/pg_loss": summed(2.0)})]])
def test_metrics_are_means_over_the_optimizer_steps_that_are_taken(changes: list[Change]) -> None:
    """Two of three mini-batches; their passes have sums of 4 and 6, and each change adds 2."""
    found = learn(CountingEngine(norms=[5.0, 1.0], skipped=1.0), [[0], [0], [1], [1], [1], [0]], changes)
    assert found == {
        "actor/pg_loss": 8.0 if changes else 5.0,
        "actor/grad_norm": 3.0,
        "actor/grad_norm_max": 5.0,
        "actor/lr": 0.1,
        "actor/skipped_steps": 2.0,
        "actor/oom_splits": 0.0,
    }


def test_the_first_optimizer_step_is_the_first_that_is_taken() -> None:
    """The first mini-batch has no trained token, in either epoch."""
    seen = []

    def make(counts: Denominators, first: bool) -> None:
        seen.append((counts.tokens, first))

    learn(CountingEngine(), [[0, 0], [0], [1, 1], [1], [0, 1], [1]], make=make, epochs=2)
    assert seen == [(3, True), (2, False), (3, False), (2, False)]
