"""The frozen reference policy. With LoRA it is the actor itself with its adapters disabled
(`ActorWorker`).

In: trajectories. Out: `ref_log_prob`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydraflow.batch_plan.parts import MicroPlan
from hydraflow.dispatch.modes import register
from hydraflow.dispatch.worker import ProcessContext
from hydraflow.engine.config import EngineConfig
from hydraflow.models.ask import Ask
from hydraflow.models.config import ModelConfig
from hydraflow.protocol.batch import DataProto
from hydraflow.workers.engine_worker import DATA_RANKS, EngineWorker


@dataclass(frozen=True)
class ReferenceSpec:
    """Constructor arguments of a ReferenceWorker."""

    strategy: str
    model: ModelConfig
    engine: EngineConfig
    log_prob: MicroPlan
    temperature: float
    """Divides the logits, as in sampling."""
    field: str = "actor_rollout_ref.model"
    """Configuration key of `model`, for messages."""


class ReferenceWorker(EngineWorker):
    """One process of the reference policy."""

    def __init__(self, process: ProcessContext, spec: ReferenceSpec):
        super().__init__(process, spec.strategy, spec.model, spec.engine, head="policy", field=spec.field)
        self.spec = spec
        self.log_prob_batcher = self.micro_batcher(spec.log_prob, "log-probabilities of the reference")

    @register(dispatch_mode=DATA_RANKS, read_only=True)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """`ref_log_prob` of the responses."""
        output = self.infer(batch, self.log_prob_batcher, Ask(self.spec.temperature), name="ref")
        return output.rename("log_probs", "ref_log_prob")
