"""What actor and critic share: optimizer steps over a step's trajectories, and forward passes that only compute.

In: one data rank's rows, ordered by mini-batch (the controller chose which rows, see `trainer/mini_batches.py`).
Out: metrics, or columns. Which rows share an optimizer step never depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hydraflow.algorithms.aggregate import Denominators
from hydraflow.batch_plan.parts import MicroPlan, RolePlan
from hydraflow.engine.base import LossFn, TrainEngine
from hydraflow.engine.micro_batches import MicroBatches, split_rows, split_tokens
from hydraflow.metrics import Metric, largest, mean, merge
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.ragged import parts

LossFactory = Callable[[Denominators, bool], LossFn]
"""Makes a mini-batch's loss from its denominators; the flag says that no optimizer step of this training step came before."""


def train_mini_batches(
    engine: TrainEngine, batch: DataProto, plan: RolePlan, make_loss: LossFactory, *, temperature: float, entropy: bool, prefix: str
) -> dict[str, Metric]:
    """Takes every optimizer step of one training step.

    `batch` holds `plan.rows_per_rank` rows for each mini-batch, one mini-batch after the other. Metrics are averaged over
    the optimizer steps; `prefix` is actor or critic.
    """
    mini_batches = batch.split(plan.rows_per_rank)
    denominators = global_denominators(engine, mini_batches)
    optimizer_steps = len(mini_batches) * plan.epochs
    collected: list[dict[str, Metric]] = []
    for epoch in range(plan.epochs):
        for k, (mini_batch, denominator) in enumerate(zip(mini_batches, denominators, strict=True)):
            micro_batches = split(engine, mini_batch, plan.micro).parts
            loss = make_loss(denominator, epoch == 0 and k == 0)
            metrics = engine.forward_backward(micro_batches, loss, temperature=temperature, entropy=entropy)
            collected += [metrics, _step_metrics(engine.optimizer_step(), prefix)]
    engine.lr_step()
    return {name: _per_step(metric, optimizer_steps) for name, metric in merge(collected).items()}


def global_denominators(engine: TrainEngine, mini_batches: Sequence[DataProto]) -> list[Denominators]:
    """Trained tokens and sequences of each mini-batch, over all data ranks: one reduction for all of them."""
    counts = torch.tensor([_mask_counts(mini_batch) for mini_batch in mini_batches], dtype=torch.float64)  # (K, 2)
    return [Denominators(tokens=tokens, sequences=sequences) for tokens, sequences in engine.reduce(counts).tolist()]


def forward_in_order(engine: TrainEngine, batch: DataProto, micro: MicroPlan, **options: Any) -> DataProto:
    """Forward passes over all rows; columns come back in the order of `batch`. `options` are those of `TrainEngine.forward`."""
    micro_batches = split(engine, batch, micro)
    return micro_batches.restore(engine.forward(micro_batches.parts, **options))


def split(engine: TrainEngine, batch: DataProto, micro: MicroPlan) -> MicroBatches:
    """Micro-batches as the plan says, as many on every data rank."""
    if micro.rows is not None:
        return split_rows(batch, micro.rows)
    assert micro.max_tokens is not None, "a micro-batch plan counts rows or tokens"
    return split_tokens(batch, micro.max_tokens, lambda values: engine.reduce(values, "max"))


def _mask_counts(mini_batch: DataProto) -> tuple[float, float]:
    values, lengths = parts(mini_batch.get("response_mask"))
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    per_row = torch.zeros(len(lengths), dtype=torch.float64).index_add_(0, rows, values.double())
    return float(per_row.sum()), float((per_row > 0).sum())


def _step_metrics(step: dict[str, float], prefix: str) -> dict[str, Metric]:
    """grad_norm is averaged over optimizer steps and also kept as its largest; the rate is the same on every rank."""
    metrics = {f"{prefix}/{name}": mean(value) for name, value in step.items()}
    metrics[f"{prefix}/grad_norm_max"] = largest(step["grad_norm"])
    return metrics


def _per_step(metric: Metric, optimizer_steps: int) -> Metric:
    return replace(metric, value=metric.value / optimizer_steps) if metric.how == "sum" else metric
