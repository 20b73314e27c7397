"""A model that learns from conversations, on the same engine as the policy.

In: conversations as `prompts`, `responses` and a `response_mask` that selects the trained tokens. Out:
metrics.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydraflow.algorithms.aggregate import Denominators
from hydraflow.algorithms.sft_loss import SFTLoss
from hydraflow.batch_plan.parts import RolePlan
from hydraflow.dispatch.modes import mesh_mode, register
from hydraflow.dispatch.worker import ProcessContext
from hydraflow.engine.config import FSDPConfig, OptimConfig
from hydraflow.metrics import Metric
from hydraflow.models.ask import Ask
from hydraflow.models.config import ModelConfig
from hydraflow.protocol.batch import DataProto
from hydraflow.workers.engine_worker import EngineWorker
from hydraflow.workers.skipping import SkipLimits
from hydraflow.workers.training import forward_in_order


@dataclass(frozen=True)
class SFTSpec:
    """Constructor arguments of an SFTWorker."""

    model: ModelConfig
    optim: OptimConfig
    fsdp_config: FSDPConfig
    plan: RolePlan
    total_steps: int
    """Optimizer steps of the run, for the schedule."""
    seed: int
    """Seeds the initialisation of new weights (adapters)."""
    skip_limits: SkipLimits = SkipLimits()
    """Limits on optimizer steps skipped for a non-finite gradient."""


class SFTWorker(EngineWorker):
    """One process of a supervised run."""

    def __init__(self, process: ProcessContext, spec: SFTSpec):
        super().__init__(
            process,
            "fsdp2",
            spec.model,
            spec.fsdp_config,
            spec.optim,
            head="policy",
            total_steps=spec.total_steps,
            field="model",
            seed=spec.seed,
        )
        self.evaluation_batcher = self.micro_batcher(spec.plan.micro, "evaluation")
        self.learner = self.make_learner(
            spec.plan, spec.skip_limits, what="update", role="model", prefix="train"
        )

    @register(dispatch_mode=mesh_mode("sft"), read_only=True, padding=False)
    def update(self, batch: DataProto, step: int) -> dict[str, Metric]:
        """The optimizer step of training step `step`."""
        return self.learner.learn(batch, self._loss, step)

    @register(dispatch_mode=mesh_mode("sft"), read_only=True)
    def evaluate(self, batch: DataProto) -> DataProto:
        """`log_probs` and `greedy_match` (1 where the token is the most probable one) of every response
        token."""
        return forward_in_order(self.engine, batch, self.evaluation_batcher, Ask(greedy_match=True))

    def _loss(self, denominators: Denominators, first: bool) -> SFTLoss:
        return SFTLoss(denominators)
