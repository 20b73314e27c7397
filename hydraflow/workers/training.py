"""Shared by actor, critic and supervised model: optimizer steps over a step's trajectories, and forward
passes without gradients.

In: one data rank's rows, ordered by mini-batch (the controller chose which rows, see
`trainer/mini_batches.py`). Out: metrics, or columns. Which rows share an optimizer step never depends on the
number of ranks. Left out on purpose: micro-batches that turn out too large (`micro_batcher.py`), gradients
that are not finite (`skipping.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hydraflow import metrics as reductions
from hydraflow.algorithms.aggregate import Denominators
from hydraflow.batch_plan.parts import RolePlan
from hydraflow.dispatch.spans import span
from hydraflow.engine.base import LossFn, TrainEngine
from hydraflow.engine.micro_batches import MicroBatches
from hydraflow.metrics import Metric, maximum, mean, merge
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.ragged import parts
from hydraflow.workers.micro_batcher import MicroBatcher
from hydraflow.workers.skipping import SkipGuard

LossFactory = Callable[[Denominators, bool], LossFn]
"""Builds a mini-batch's loss from its denominators; the flag marks the first optimizer step of a training
step."""


@dataclass
class Learner:
    """The optimizer steps of one role."""

    engine: TrainEngine
    plan: RolePlan
    micro_batcher: MicroBatcher
    """Micro-batches of an update."""
    skip_guard: SkipGuard
    prefix: str
    """Prefix of the metrics: actor, critic or train."""

    def learn(
        self, batch: DataProto, make_loss: LossFactory, *, step: int, temperature: float, entropy: bool
    ) -> dict[str, Metric]:
        """Takes every optimizer step of training step `step`, the first of which is 1.

        `batch` holds `plan.rows_per_rank` rows for each mini-batch, one mini-batch after the other. Metrics
        are averaged over the optimizer steps. GuardStop when too many of those in a row are skipped.
        """
        mini_batches = batch.split(self.plan.rows_per_rank)
        denominators = global_denominators(self.engine, mini_batches)
        of_rows, of_steps = [], []
        for number in range(len(mini_batches) * self.plan.epochs):
            rows = mini_batches[number % len(mini_batches)]
            loss = make_loss(denominators[number % len(mini_batches)], number == 0)
            with span("gradient"):
                of_rows.append(self._gradient(rows, loss, temperature=temperature, entropy=entropy))
            with span("optimizer_step"):
                of_steps.append(self.engine.optimizer_step())
            facts = reductions.values(of_rows[-1]) | of_steps[-1]
            self.skip_guard.note(
                rows, skipped=bool(of_steps[-1]["skipped"]), step=step, number=number, facts=facts
            )
        self.engine.lr_step()
        found = merge([*of_rows, *(_step_metrics(of_step, self.prefix) for of_step in of_steps)])
        skipped = sum(of_step["skipped"] for of_step in of_steps)
        per_step = {
            name: replace(metric, value=metric.value / len(of_steps)) if metric.how == "sum" else metric
            for name, metric in found.items()
        }
        return per_step | {f"{self.prefix}/skipped_steps": maximum(skipped)}

    def _gradient(
        self, rows: DataProto, loss: LossFn, *, temperature: float, entropy: bool
    ) -> dict[str, Metric]:
        def passes(micro: MicroBatches) -> dict[str, Metric]:
            return self.engine.forward_backward(micro.parts, loss, temperature=temperature, entropy=entropy)

        return self.micro_batcher.work(self.engine, rows, passes)


def global_denominators(engine: TrainEngine, mini_batches: Sequence[DataProto]) -> list[Denominators]:
    """Trained tokens and sequences of each mini-batch, over all data ranks: one reduction for all of them."""
    counts = torch.tensor(list(map(_mask_counts, mini_batches)), dtype=torch.float64)  # (K, 2)
    return [Denominators(tokens=tokens, sequences=rows) for tokens, rows in engine.reduce(counts).tolist()]


def forward_in_order(
    engine: TrainEngine, batch: DataProto, micro_batcher: MicroBatcher, **options: Any
) -> DataProto:
    """Forward passes over all rows; columns come back in the order of `batch`. `options` are those of
    `TrainEngine.forward`."""
    return micro_batcher.work(
        engine, batch, lambda micro: micro.restore(engine.forward(micro.parts, **options))
    )


def _mask_counts(mini_batch: DataProto) -> tuple[float, float]:
    values, lengths = parts(mini_batch.get("response_mask"))
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    per_row = torch.zeros(len(lengths), dtype=torch.float64).index_add_(0, rows, values.double())
    return float(per_row.sum()), float((per_row > 0).sum())


def _step_metrics(step: dict[str, float], prefix: str) -> dict[str, Metric]:
    """grad_norm is averaged over optimizer steps, and its maximum kept; the learning rate is the same on all
    ranks."""
    return {
        f"{prefix}/grad_norm": mean(step["grad_norm"]),
        f"{prefix}/grad_norm_max": maximum(step["grad_norm"]),
        f"{prefix}/lr": mean(step["lr"]),
    }
