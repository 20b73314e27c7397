"""Held-out problems: sampled, scored and averaged per data source.

In: the held-out prompts. Out: `val-core/<data_source>/acc/mean@n`, `val-core/<data_source>/reward/mean@n`, and samples to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.dispatch.runtime import Runtime
from hydraflow.protocol.batch import DataProto
from hydraflow.schema import PPOConfig
from hydraflow.trainer.ppo import columns, warn_of_failures
from hydraflow.trainer.roles import Roles, SamplingRoles
from hydraflow.trainer.rollouts import SCORING_OBJECTS, sample
from hydraflow.workers.reward import WITH_TEXTS, RewardWorker
from hydraflow.workers.rollout import SampleOrder


@dataclass(frozen=True)
class Scored:
    """One validation call's rows, as arrays of equal length."""

    sources: np.ndarray
    scores: np.ndarray
    accuracies: np.ndarray
    texts: list[str]
    truths: list[object]


def metric_names(batches: Sequence[DataProto], plan: BatchPlan) -> set[str]:
    """What a validation with these prompts measures."""
    sources = {str(source) for batch in batches for source in batch.non_tensor_batch["data_source"]}
    n = plan.validation.samples_per_prompt
    return {f"val-core/{source}/{name}/mean@{n}" for source in sources for name in ("acc", "reward")}


class Validator:
    """Runs the held-out prompts through the generation engine and the reward function."""

    def __init__(self, config: PPOConfig, plan: BatchPlan, roles: Roles | SamplingRoles, runtime: Runtime, batches: Sequence[DataProto]):
        self.config, self.plan, self.roles, self.runtime, self.batches = config, plan, roles, runtime, batches

    def run(self) -> tuple[dict[str, float], list[dict[str, object]]]:
        """Metrics over all held-out prompts, and the first `trainer.log_val_generations` samples."""
        parts = [self._score(batch) for batch in self.batches]
        sources = np.concatenate([part.sources for part in parts])
        found = {
            "acc": np.concatenate([part.accuracies for part in parts]),
            "reward": np.concatenate([part.scores for part in parts]),
        }
        n = self.plan.validation.samples_per_prompt
        metrics = {
            f"val-core/{source}/{name}/mean@{n}": float(column[sources == source].mean())
            for source in np.unique(sources)
            for name, column in found.items()
        }
        return metrics, self._samples(parts)

    def _score(self, prompts: DataProto) -> Scored:
        val = self.config.actor_rollout_ref.rollout.val_kwargs
        order = SampleOrder(-1, self.plan.validation.samples_per_prompt, val.temperature if val.do_sample else 0.0, val.top_k, val.top_p)
        assert self.roles.rollout is not None, "a run that validates has a generation engine"
        batch = sample(self.roles.rollout, prompts, order)
        inputs = batch.select(["responses"], SCORING_OBJECTS, [])
        inputs.meta_info[WITH_TEXTS] = True
        scored = self.roles.reward.call(RewardWorker.score, inputs).get()
        warn_of_failures(scored, "validation")
        read = self.runtime.fetch(columns(scored, ["score", "acc", "text"]))
        return Scored(
            sources=batch.objects["data_source"].astype(str),
            scores=read.get("score").numpy(),
            accuracies=read.get("acc").numpy(),
            texts=list(read.non_tensor_batch["text"]),
            truths=[row.get("ground_truth") for row in batch.objects["reward_model"]],
        )

    def _samples(self, parts: Sequence[Scored]) -> list[dict[str, object]]:
        samples: list[dict[str, object]] = []
        for part in parts:
            for text, truth, score in zip(part.texts, part.truths, part.scores.tolist(), strict=True):
                if len(samples) == self.config.trainer.log_val_generations:
                    return samples
                samples.append({"output": text, "ground_truth": truth, "score": score})
        return samples
