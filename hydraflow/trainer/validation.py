"""Held-out problems: sampled, scored and averaged per data source.

In: the held-out prompts. Out: `val-core/<data_source>/acc/mean@n`, `val-core/<data_source>/reward/mean@n`,
and samples to read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.dispatch.runtime import Runtime
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.remote import RemoteBatch
from hydraflow.schema import PPOConfig
from hydraflow.trainer.generations import GenerationDump, ScoredResponses, read_scored
from hydraflow.trainer.ppo import judge_failures
from hydraflow.trainer.roles import Roles, SamplingRoles
from hydraflow.trainer.rollouts import sample, score_samples
from hydraflow.workers.rollout import SamplingSpec


def metric_names(batches: Sequence[DataProto], plan: BatchPlan) -> set[str]:
    """Names of the metrics of a validation on these prompts."""
    sources = {str(source) for batch in batches for source in batch.non_tensor_batch["data_source"]}
    n = plan.validation.samples_per_prompt
    return {f"val-core/{source}/{name}/mean@{n}" for source in sources for name in ("acc", "reward")}


class Validator:
    """Runs the held-out prompts through the generation engine and the reward function."""

    def __init__(
        self,
        config: PPOConfig,
        plan: BatchPlan,
        roles: Roles | SamplingRoles,
        runtime: Runtime,
        batches: Sequence[DataProto],
    ):
        self.config, self.plan, self.roles, self.runtime, self.batches = config, plan, roles, runtime, batches
        self.dump = GenerationDump.to(config.trainer.validation_data_dir, "trainer.validation_data_dir")

    def run(self, step: int) -> tuple[dict[str, float], list[dict[str, object]]]:
        """Metrics over all held-out prompts after a step, and the first `trainer.log_val_generations`
        samples."""
        scored = [self._score(batch) for batch in self.batches]
        n = self.plan.validation.samples_per_prompt
        parts = [
            read_scored(self.runtime, prompts, n, part)
            for prompts, part in zip(self.batches, scored, strict=True)
        ]
        if self.dump is not None:
            self.dump.write(step, [row for part in parts for row in part.rows(step)])
        most = self.config.reward.max_failed_share
        judge_failures(scored, most, f"validation after step {step}", "its averages would say nothing")
        sources = np.concatenate([part.sources for part in parts])
        found = {
            "acc": np.concatenate([part.accuracies for part in parts]),
            "reward": np.concatenate([part.scores for part in parts]),
        }
        metrics = {
            f"val-core/{source}/{name}/mean@{n}": float(column[sources == source].mean())
            for source in np.unique(sources)
            for name, column in found.items()
        }
        return metrics, self._samples(parts)

    def _score(self, prompts: DataProto) -> RemoteBatch:
        val = self.config.actor_rollout_ref.rollout.val_kwargs
        order = SamplingSpec(
            -1,
            self.plan.validation.samples_per_prompt,
            val.temperature if val.do_sample else 0.0,
            val.top_k,
            val.top_p,
        )
        assert self.roles.rollout is not None, "a run that validates has a generation engine"
        sampling = sample(self.roles.rollout, prompts, order)
        scored: RemoteBatch = score_samples(
            self.roles.reward, prompts, sampling, order.n, with_texts=True
        ).get()
        return scored

    def _samples(self, parts: Sequence[ScoredResponses]) -> list[dict[str, object]]:
        samples: list[dict[str, object]] = []
        for part in parts:
            for prompt, text, truth, score in zip(
                part.prompts, part.texts, part.truths, part.scores.tolist(), strict=True
            ):
                if len(samples) == self.config.trainer.log_val_generations:
                    return samples
                samples.append({"input": prompt, "output": text, "ground_truth": truth, "score": score})
        return samples
