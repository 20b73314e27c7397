"""Training on pairs of responses, for DPO and reward models: one optimizer step per batch of pairs.

In: pairs, configuration, plan. Out: as in `sft.py`. It differs from supervised training in the objective, the
reference's log-probabilities, and the metrics on held-out pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hydraflow import metrics as reductions
from hydraflow.algorithms.preference import BradleyTerry, DirectPreference, Objective, pair_metrics
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.engine.config import SUPERVISED
from hydraflow.protocol.batch import DataProto
from hydraflow.schema import DPOConfig, RMConfig
from hydraflow.trainer.sft import SFTTrainer
from hydraflow.workers.engine_worker import EngineWorker
from hydraflow.workers.pairs import PairSpec, PairWorker
from hydraflow.workers.reference import ReferenceSpec, ReferenceWorker
from hydraflow.workers.skipping import SkipLimits


class PairTrainer(SFTTrainer):
    """Trains a worker group on the pairs of a loader."""

    def roles(self, skip_limits: SkipLimits) -> dict[str, RoleSpec]:
        """The trained model and, for a policy without adapters, its frozen reference."""
        spec = PairSpec(**self.spec(skip_limits), objective=self.objective)
        roles = {"sft": RoleSpec(PairWorker, (spec,))}
        if self.has_reference and self.config.model.lora_rank == 0:
            config, micro = self.config, replace(self.plan.role.micro, unit=1)
            ref = ReferenceSpec(SUPERVISED, config.model, config.fsdp_config, micro, 1.0, field="model")
            roles["ref"] = RoleSpec(ReferenceWorker, (ref,))
        return roles

    def step(self, step: int, interrupt: Callable[[], None]) -> dict[str, float]:
        metrics = super().step(step, interrupt)
        if "ref" in self.group.roles:
            passed = self.group.role("ref").call(EngineWorker.utilization_metrics)
            metrics |= reductions.values(passed.get())
        return metrics

    @property
    def objective(self) -> Objective:
        if isinstance(self.config, DPOConfig):
            return DirectPreference(self.config.dpo)
        assert isinstance(self.config, RMConfig), "only DPO and reward models train on pairs"
        return BradleyTerry(self.config.rm)

    @property
    def has_reference(self) -> bool:
        """Whether the objective needs the initial model as reference."""
        return isinstance(self.config, DPOConfig)

    def prepared(self, batch: DataProto, step: int | None = None) -> DataProto:
        """The batch with `ref_log_prob`, if the objective reads it."""
        if not self.has_reference:
            return batch
        with self.timer.phase("ref", step):
            if "ref" in self.group.roles:
                found = self.group.role("ref").call(ReferenceWorker.compute_ref_log_prob, batch)
            else:
                found = self.role.call(PairWorker.compute_ref_log_prob, batch)
            return batch.union(self.runtime.fetch(found))

    def measure(self, batch: DataProto) -> dict[str, reductions.Metric]:
        """Loss, accuracy (share of pairs in which the preferred response scores higher), margin and scores,
        as `val/...`."""
        batch = self.prepared(batch)
        scores = self.runtime.fetch(self.role.call(PairWorker.compute_scores, batch)).get("score")
        columns = {"margin": batch.get("margin")} if "margin" in batch.keys() else {}
        return pair_metrics("val", self.objective.losses(scores, columns), scores)
