"""The critic: value estimates per response token, and its updates.

In: trajectories with `returns`. Out: `values`, metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hydraflow.algorithms.critic_loss import ValueLoss
from hydraflow.batch_plan.parts import MicroPlan, RolePlan
from hydraflow.dispatch.modes import register
from hydraflow.dispatch.worker import ProcessContext
from hydraflow.engine.config import engine_config
from hydraflow.protocol.batch import DataProto
from hydraflow.workers.config import CriticConfig
from hydraflow.workers.engine_worker import DATA_RANKS
from hydraflow.workers.skipping import SkipLimits
from hydraflow.workers.training import TrainedWorker, UpdateLoss


@dataclass(frozen=True)
class CriticSpec:
    """Constructor arguments of a CriticWorker; `critic.model.path` is resolved."""

    critic: CriticConfig
    plan: RolePlan
    values: MicroPlan
    """Micro-batches of the value pass."""
    response_tokens: int
    """Longest response: the divisor of seq-mean-token-sum-norm."""
    total_steps: int
    """Training steps of the run, for the schedule."""
    seed: int
    """Seeds the initialisation of new weights (value head, adapters)."""
    skip_limits: SkipLimits = SkipLimits()
    """Limits on optimizer steps skipped for a non-finite gradient."""


class CriticWorker(TrainedWorker):
    """One process of the critic's training engine."""

    def __init__(self, process: ProcessContext, spec: CriticSpec):
        critic = spec.critic
        super().__init__(
            process,
            critic.strategy,
            critic.model,
            engine_config(critic.strategy, critic),
            critic.optim,
            head="value",
            total_steps=spec.total_steps,
            field="critic.model",
            seed=spec.seed,
        )
        self.spec = spec
        self.values_batcher = self.micro_batcher(spec.values, "values of the critic")
        self.learner = self.make_learner(
            spec.plan, spec.skip_limits, what="update of the critic", role="critic", prefix="critic"
        )

    @register(dispatch_mode=DATA_RANKS, read_only=True)
    def compute_values(self, batch: DataProto) -> DataProto:
        """`values` of every response token."""
        return self.infer(batch, self.values_batcher, name="critic")

    def update_loss(self, facts: Mapping[str, Any], step: int) -> UpdateLoss:
        critic = self.spec.critic
        return UpdateLoss(
            lambda denominators, first: ValueLoss(
                denominators=denominators,
                scale_factor=self.spec.response_tokens,
                cliprange=critic.cliprange_value,
                agg_mode=critic.loss_agg_mode,
            )
        )
