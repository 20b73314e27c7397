"""A model trained on pairs of responses: a policy (DPO, IPO) or a reward model.

In: rows in pairs, the preferred one first, and for a policy their `ref_log_prob`. Out: metrics, or a score
for each row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hydraflow.algorithms.aggregate import Denominators
from hydraflow.algorithms.preference import Objective, PairLoss
from hydraflow.algorithms.trained_tokens import row_sums
from hydraflow.dispatch.modes import register
from hydraflow.dispatch.worker import ProcessContext
from hydraflow.engine.base import LossFn
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.ragged import parts
from hydraflow.workers.engine_worker import DATA_RANKS
from hydraflow.workers.sft import SFTSpec, SFTWorker


@dataclass(frozen=True)
class PairSpec(SFTSpec):
    """Constructor arguments of a PairWorker."""

    objective: Objective = field(kw_only=True)


class PairWorker(SFTWorker):
    """One process of a model that is trained on pairs."""

    def __init__(self, process: ProcessContext, spec: PairSpec):
        super().__init__(process, spec, head=spec.objective.head)
        self.objective = spec.objective

    @register(dispatch_mode=DATA_RANKS, read_only=True)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """`ref_log_prob` of the responses: without the adapters, the model is its own reference."""
        output = self.infer(batch, self.evaluation_batcher, name="ref", adapter=False)
        return output.rename("log_probs", "ref_log_prob")

    @register(dispatch_mode=DATA_RANKS, read_only=True)
    def compute_scores(self, batch: DataProto) -> DataProto:
        """`score` of every row, as the objective defines it."""
        output = self.engine.forward_rows(batch, self.evaluation_batcher)
        answer = output.get("log_probs" if self.objective.head == "policy" else "values")
        mask, lengths = parts(batch.get("response_mask"))
        scores = self.objective.token_scores(parts(answer)[0], batch.flat_columns()) * mask
        return DataProto.from_dict(tensors={"score": row_sums(scores, lengths).float()})

    def _loss(self, denominators: Denominators, first: bool) -> LossFn:
        return PairLoss(denominators, self.objective)
