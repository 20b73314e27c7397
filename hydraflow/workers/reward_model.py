"""The reward model: a frozen value model whose value after the last token is a response's score.

In: trajectories. Out: `score`. Left out on purpose: models with a different tokenizer, which would need
conversations to be re-tokenized; a run refuses them before it starts.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydraflow.algorithms.trained_tokens import row_sums
from hydraflow.batch_plan.parts import MicroPlan
from hydraflow.data.pairs import ending
from hydraflow.dispatch.modes import register
from hydraflow.dispatch.worker import ProcessContext
from hydraflow.engine.config import SUPERVISED, FSDPConfig
from hydraflow.models.config import ModelConfig
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.ragged import from_rows, parts, rows
from hydraflow.workers.engine_worker import DATA_RANKS, EngineWorker


@dataclass(frozen=True)
class RewardModelSpec:
    """Constructor arguments of a RewardModelWorker."""

    model: ModelConfig
    micro: MicroPlan


class RewardModelWorker(EngineWorker):
    """One process of the reward model."""

    def __init__(self, process: ProcessContext, spec: RewardModelSpec):
        super().__init__(process, SUPERVISED, spec.model, FSDPConfig(), head="value", field=REWARD_MODEL)
        self.batcher = self.micro_batcher(spec.micro, "scores of the reward model")

    @register(dispatch_mode=DATA_RANKS, blocking=False, read_only=True)
    def compute_scores(self, batch: DataProto) -> DataProto:
        """`score` of every row, from `prompts` and `responses`."""
        ended = [ending(response) for response in rows(batch.get("responses"))]
        columns = {
            "prompts": batch.get("prompts"),
            "responses": from_rows([response for response, _ in ended]),
            "response_mask": from_rows([mask for _, mask in ended]),
        }
        output = self.infer(DataProto.from_dict(columns), self.batcher, name="reward_model")
        values, lengths = parts(output.get("values"))
        mask = parts(columns["response_mask"])[0]
        return DataProto.from_dict(tensors={"score": row_sums(values * mask, lengths).float()})


REWARD_MODEL = "reward.reward_model.model"
"""Configuration path of the model for messages; the key is this with `_path`."""
