"""The update of a training step, shared by actor, critic and supervised model.

In: one data rank's rows, ordered by mini-batch (the controller chose which rows, see
`trainer/mini_batches.py`). Out: metrics. Which rows share an optimizer step never depends on the number of
ranks. Left out on purpose: micro-batches (`engine/micro_batcher.py`), gradients that are not finite
(`skipping.py`).
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hydraflow import metrics as reductions
from hydraflow.algorithms.aggregate import Denominators
from hydraflow.algorithms.trained_tokens import row_sums
from hydraflow.batch_plan.parts import RolePlan
from hydraflow.dispatch.modes import Dispatch, register
from hydraflow.dispatch.spans import span
from hydraflow.engine.base import LossFn, TrainEngine
from hydraflow.engine.micro_batcher import MicroBatcher, live_rows
from hydraflow.metrics import Metric, maximum, mean, merge
from hydraflow.models.ask import LOG_PROBS, Ask
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.ragged import from_parts, parts
from hydraflow.workers.engine_worker import DATA_RANKS, EngineWorker
from hydraflow.workers.skipping import SkipGuard, SkipLimits

ROWS_PER_RANK = "rows_per_rank"
"""Key of a batch's meta_info: for each mini-batch, its number of rows on each data rank."""

Change = Callable[[DataProto], tuple[DataProto, dict[str, Metric]]]
"""Changes a mini-batch before its optimizer step: its mask, or columns for the loss."""
LossFactory = Callable[[Denominators, bool], LossFn]
"""Builds a mini-batch's loss from its denominators; the flag marks the first optimizer step of a training
step."""


@dataclass(frozen=True)
class UpdateLoss:
    """The loss of one training step's optimizer steps."""

    make: LossFactory
    ask: Ask = LOG_PROBS
    """Model outputs that the loss needs."""
    changes: Sequence[Change] = ()


class TrainedWorker(EngineWorker):
    """One process of a model that is trained."""

    learner: Learner

    def make_learner(
        self, plan: RolePlan, limits: SkipLimits, *, what: str, role: str, prefix: str
    ) -> Learner:
        """The optimizer steps of this model. `what` names their pass in messages, `role` the model in
        messages and files, `prefix` its metrics."""
        skip_guard = SkipGuard(limits, role, self.process.rank)
        micro_batcher = self.micro_batcher(plan.micro, what)
        return Learner(self.engine, plan, micro_batcher, skip_guard, prefix, self.micro_batchers)

    @abstractmethod
    def update_loss(self, facts: Mapping[str, Any], step: int) -> UpdateLoss:
        """The loss of training step `step`; `facts` are the meta_info of its rows."""

    @register(dispatch_mode=DATA_RANKS, blocking=False, read_only=True, padding=False)
    def update(self, batch: DataProto, step: int) -> dict[str, Metric]:
        """Takes all optimizer steps of training step `step`; rows are ordered by mini-batch. For
        `perf/mfu/<role>` see `Utilization`."""
        learner, start = self.learner, time.perf_counter()
        metrics = learner.learn(batch, self.update_loss(batch.meta_info, step), step)
        seconds = time.perf_counter() - start
        self.utilization.note(learner.prefix, batch, seconds, updates=learner.plan.epochs)
        return metrics | self.utilization.metrics()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def skip_step(self) -> None:
        """A training step without trainable rows: only advances the learning rate."""
        self.engine.lr_step()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def skipped_in_a_row(self) -> int:
        """Optimizer steps skipped since the last successful one; the same on every rank."""
        return self.learner.skip_guard.in_a_row

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count_skipped_from(self, in_a_row: int) -> None:
        """Restores the count that `skipped_in_a_row` had when the checkpoint was saved."""
        self.learner.skip_guard.in_a_row = in_a_row


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
    micro_batchers: Sequence[MicroBatcher] = ()
    """Micro-batches of all passes of the model, whose splits are counted."""

    def learn(self, batch: DataProto, loss: UpdateLoss, step: int) -> dict[str, Metric]:
        """Takes all optimizer steps of training step `step` (from 1).

        `batch` holds one mini-batch after the other, of `plan.rows_per_rank` rows or of as many as
        `meta_info[ROWS_PER_RANK]` lists. The column `live`, if present, is false for padding rows.
        Metrics are averaged over the optimizer steps. `oom_splits`: how often micro-batches of any pass were
        split since the last call, the same on every rank. GuardStop when too many optimizer steps in a row
        are skipped.
        """
        mini_batches = _mini_batches(_dead_rows_untrained(batch), self.plan.rows_per_rank)
        denominators = global_denominators(self.engine, mini_batches)
        of_rows: list[dict[str, Metric]] = []
        of_steps: list[dict[str, float]] = []
        for number in range(len(mini_batches) * self.plan.epochs):
            rows, counts = mini_batches[number % len(mini_batches)], denominators[number % len(mini_batches)]
            for change in loss.changes:
                with span("correction"):
                    rows, changed = change(rows)
                of_rows.append(changed)
            if loss.changes:
                [counts] = global_denominators(self.engine, [rows])
            if not counts.tokens:
                continue  # a step without a gradient would still apply momentum and weight decay
            loss_fn = loss.make(counts, not of_steps)
            with span("gradient"):
                of_rows.append(self.engine.forward_backward_rows(rows, self.micro_batcher, loss_fn, loss.ask))
            with span("optimizer_step"):
                of_steps.append(self.engine.optimizer_step())
            facts = reductions.values(of_rows[-1]) | of_steps[-1]
            self.skip_guard.note(
                live_rows(rows), skipped=bool(of_steps[-1]["skipped"]), step=step, number=number, facts=facts
            )
        self.engine.lr_step()
        return self._metrics(of_rows, of_steps)

    def _metrics(
        self, of_rows: Sequence[dict[str, Metric]], of_steps: Sequence[dict[str, float]]
    ) -> dict[str, Metric]:
        """Metrics of a training step, averaged over its optimizer steps; of `grad_norm` the maximum is kept
        as well."""
        steps = [
            {
                f"{self.prefix}/grad_norm": mean(of_step["grad_norm"]),
                f"{self.prefix}/grad_norm_max": maximum(of_step["grad_norm"]),
                f"{self.prefix}/lr": mean(of_step["lr"]),
            }
            for of_step in of_steps
        ]
        found = merge([*of_rows, *steps])
        skipped, taken = sum(of_step["skipped"] for of_step in of_steps), max(1, len(of_steps))
        per_step = {
            name: replace(metric, value=metric.value / taken) if metric.how == "sum" else metric
            for name, metric in found.items()
        }
        splits = sum(micro_batcher.take_splits() for micro_batcher in self.micro_batchers)
        return per_step | {
            f"{self.prefix}/skipped_steps": maximum(skipped),
            f"{self.prefix}/oom_splits": maximum(float(splits)),
        }


def global_denominators(engine: TrainEngine, mini_batches: Sequence[DataProto]) -> list[Denominators]:
    """Trained tokens and sequences of each mini-batch, over all data ranks: one reduction for all of them."""
    trained = [row_sums(*parts(one.get("response_mask"))) for one in mini_batches]  # tokens (B,)
    counts = [(float(tokens.sum()), float((tokens > 0).sum())) for tokens in trained]
    sums = engine.reduce(torch.tensor(counts, dtype=torch.float64))  # (mini-batches, 2)
    return [Denominators(tokens=tokens, sequences=rows) for tokens, rows in sums.tolist()]


def _mini_batches(batch: DataProto, planned: int) -> list[DataProto]:
    if ROWS_PER_RANK not in batch.meta_info:
        return batch.split(planned)
    ends = np.cumsum(batch.meta_info[ROWS_PER_RANK]).tolist()
    return [batch.slice(start, end) for start, end in zip([0, *ends], ends)]


def _dead_rows_untrained(batch: DataProto) -> DataProto:
    """The batch with a zero mask in the rows that are not `live`: they only pad the ranks' shares."""
    if "live" not in batch.keys():
        return batch
    mask, lengths = parts(batch.get("response_mask"))
    live = torch.repeat_interleave(batch.get("live"), lengths)
    return batch.with_columns({"response_mask": from_parts(mask * live, lengths)})
