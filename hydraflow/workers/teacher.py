"""A frozen model that judges the policy's samples (on-policy distillation).

In: trajectories. Out: `teacher_log_probs` of the sampled tokens, for KL estimates; or, for divergences over
the vocabulary, `target_tokens` and `teacher_top_log_probs`: at each position the sampled token, for the
policy loss, followed by the teacher's top-k. Only ids that the policy's output has are included: models of
one family pad their vocabularies differently. Left out on purpose: divergences (`algorithms/distillation`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hydraflow.dispatch.modes import register
from hydraflow.dispatch.worker import ProcessContext
from hydraflow.models.ask import Ask
from hydraflow.models.config import ModelConfig
from hydraflow.models.loading import load_config
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.ragged import from_parts, parts
from hydraflow.workers.engine_worker import DATA_RANKS
from hydraflow.workers.reference import ReferenceSpec, ReferenceWorker

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class TeacherSpec:
    """Constructor arguments of a TeacherWorker."""

    frozen: ReferenceSpec
    """The teacher's model and engine."""
    policy: ModelConfig
    """The policy's model, which provides the vocabulary."""
    over_vocabulary: bool = False
    """Whether to return the top-k for a divergence over the vocabulary."""
    most: int | None = None
    """Top-k; None: the whole vocabulary."""


class TeacherWorker(ReferenceWorker):
    """One process of a teacher."""

    def __init__(self, process: ProcessContext, spec: TeacherSpec):
        super().__init__(process, spec.frozen)
        self.ask = Ask(spec.frozen.temperature)
        if spec.over_vocabulary:
            vocabulary = vocabulary_of(load_config(spec.policy, field="actor_rollout_ref.model"))
            likeliest = vocabulary if spec.most is None else min(spec.most, vocabulary)
            self.ask = Ask(spec.frozen.temperature, likeliest=likeliest, among=vocabulary)

    @register(dispatch_mode=DATA_RANKS, read_only=True)
    def judge(self, batch: DataProto) -> DataProto:
        """The teacher's columns for these rows; see the module."""
        found = self.infer(batch, self.log_prob_batcher, self.ask, name="teacher")
        if not self.ask.likeliest:
            return found.rename("log_probs", "teacher_log_probs")
        sampled, lengths = parts(batch.get("responses"))
        targets = torch.cat([sampled[:, None], parts(found.get("top_tokens"))[0]], 1)
        return DataProto.from_dict(
            {"target_tokens": from_parts(targets, lengths), "teacher_top_log_probs": found.get("log_probs")}
        )


def vocabulary_of(described: PreTrainedConfig) -> int:
    """Vocabulary size of a model's output."""
    return int(described.get_text_config().vocab_size)
