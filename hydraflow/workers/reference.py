"""The frozen policy that KL terms measure from. With adapters it is the actor itself, adapters off (`ActorWorker`).

In: trajectories. Out: `ref_log_prob`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydraflow.batch_plan_parts import MicroPlan
from hydraflow.dispatch.modes import Coordinates, mesh_mode, register
from hydraflow.dispatch.worker import ProcessContext, Worker
from hydraflow.engine.config import FSDPConfig
from hydraflow.models.config import ModelConfig
from hydraflow.protocol.batch import DataProto
from hydraflow.workers.training import forward_in_order, start_engine


@dataclass(frozen=True)
class ReferenceSpec:
    """Everything a reference process is told."""

    strategy: str
    model: ModelConfig
    fsdp_config: FSDPConfig
    log_prob: MicroPlan
    temperature: float
    """Divides the logits, as in sampling."""


class ReferenceWorker(Worker):
    """One process of the reference policy."""

    def __init__(self, process: ProcessContext, spec: ReferenceSpec):
        super().__init__(process)
        self.spec = spec
        self.engine = start_engine(
            process,
            spec.strategy,
            spec.model,
            spec.fsdp_config,
            None,
            head="policy",
            total_steps=1,
            field="actor_rollout_ref.model",
        )

    def mesh_coordinates(self, mesh: str) -> Coordinates:
        """Which share of a batch this process gets; every data rank is collected from."""
        return Coordinates(self.engine.data_rank, self.engine.data_size, True)

    @register(dispatch_mode=mesh_mode("ref"), read_only=True)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """`ref_log_prob` of the responses."""
        output = forward_in_order(self.engine, batch, self.spec.log_prob, temperature=self.spec.temperature)
        return output.rename("log_probs", "ref_log_prob")
