"""A model trained on conversations, with the same engine as the policy.

In: conversations as `prompts`, `responses` and a `response_mask` that selects the trained tokens. Out:
metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hydraflow.algorithms.aggregate import Denominators
from hydraflow.algorithms.sft_loss import SFTLoss
from hydraflow.batch_plan.parts import RolePlan
from hydraflow.dispatch.modes import register
from hydraflow.dispatch.worker import ProcessContext
from hydraflow.engine.base import LossFn
from hydraflow.engine.config import EngineConfig, OptimConfig
from hydraflow.models.ask import Ask
from hydraflow.models.config import ModelConfig
from hydraflow.protocol.batch import DataProto
from hydraflow.workers.engine_worker import DATA_RANKS
from hydraflow.workers.skipping import SkipLimits
from hydraflow.workers.training import TrainedWorker, UpdateLoss


@dataclass(frozen=True)
class SFTSpec:
    """Constructor arguments of an SFTWorker."""

    model: ModelConfig
    optim: OptimConfig
    strategy: str
    engine: EngineConfig
    plan: RolePlan
    total_steps: int
    """Optimizer steps of the run, for the schedule."""
    seed: int
    """Seeds the initialisation of new weights (adapters)."""
    skip_limits: SkipLimits = SkipLimits()
    """Limits on optimizer steps skipped for a non-finite gradient."""


class SFTWorker(TrainedWorker):
    """One process of a supervised run."""

    def __init__(self, process: ProcessContext, spec: SFTSpec, *, head: str = "policy"):
        super().__init__(
            process,
            spec.strategy,
            spec.model,
            spec.engine,
            spec.optim,
            head=head,
            total_steps=spec.total_steps,
            field="model",
            seed=spec.seed,
        )
        # evaluation may separate the rows of a pair, which training keeps together
        self.evaluation_batcher = self.micro_batcher(replace(spec.plan.micro, unit=1), "evaluation")
        self.learner = self.make_learner(
            spec.plan, spec.skip_limits, what="update", role="model", prefix="train"
        )

    def update_loss(self, facts: Mapping[str, Any], step: int) -> UpdateLoss:
        return UpdateLoss(self._loss)

    @register(dispatch_mode=DATA_RANKS, read_only=True)
    def evaluate(self, batch: DataProto) -> DataProto:
        """`log_probs` and `greedy_match` (1 where the token is the most probable one) of every response
        token."""
        return self.engine.forward_rows(batch, self.evaluation_batcher, Ask(greedy_match=True))

    def _loss(self, denominators: Denominators, first: bool) -> LossFn:
        return SFTLoss(denominators)
