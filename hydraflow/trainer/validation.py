"""Validation on held-out prompts: sampled, scored and averaged per data source.

In: a source that takes the held-out prompts call by call. Out: `val-core/<data_source>/acc/mean@n`,
`val-core/<data_source>/reward/mean@n`, and samples as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.dispatch.runtime import Runtime
from hydraflow.schema import PPOConfig
from hydraflow.tracking.run_folder import RunFolder
from hydraflow.tracking.trackers import Trackers
from hydraflow.trainer.generations import GenerationDump, ScoredResponses, read_scored
from hydraflow.trainer.roles import most_failed_share
from hydraflow.trainer.source import TrajectorySource, check_failures
from hydraflow.workers.reward import WHY_FAILED


def metric_names(sources: Iterable[str], plan: BatchPlan) -> set[str]:
    """Names of the metrics of a validation on prompts of these data sources."""
    n = plan.validation.samples_per_prompt
    return {f"val-core/{source}/{name}/mean@{n}" for source in sources for name in ("acc", "reward")}


class Validator:
    """Averages over all held-out prompts, which `source` takes in `calls` calls. The first
    `trainer.log_val_generations` samples go to the run folder and the trackers."""

    def __init__(
        self,
        config: PPOConfig,
        plan: BatchPlan,
        source: TrajectorySource,
        calls: int,
        runtime: Runtime,
        folder: RunFolder,
        trackers: Trackers,
    ):
        self.config, self.source, self.calls = config, source, calls
        self.n, self.runtime = plan.validation.samples_per_prompt, runtime
        self.folder, self.trackers = folder, trackers
        self.dump = GenerationDump.to(config.trainer.validation_data_dir, "trainer.validation_data_dir")

    def run(self, step: int, version: int) -> dict[str, float]:
        """Metrics over all held-out prompts after a step, with the weights of that version."""
        self.source.published(version)
        taken = [self.source.take(step) for _ in range(self.calls)]
        parts = [read_scored(self.runtime, part) for part in taken]
        if self.dump is not None:
            self.dump.write(step, [row for part in parts for row in part.rows(step)])
        failed = np.concatenate([part.failed for part in parts])
        causes = (part.scoring.get().meta_info.get(WHY_FAILED) for part in taken)
        why, most = next(filter(None, causes), None), most_failed_share(self.config)
        where, so = f"validation after step {step}", "its averages would mean nothing"
        check_failures(int(failed.sum()), len(failed), why, most, where=where, so=so)
        if samples := self._samples(parts):
            self.folder.write_samples(step, samples)
            self.trackers.log_samples(samples, step)
        sources = np.concatenate([part.sources for part in parts])
        found = {
            "acc": np.concatenate([part.accuracies for part in parts]),
            "reward": np.concatenate([part.scores for part in parts]),
        }
        means = {
            f"val-core/{source}/{name}/mean@{self.n}": float(column[(sources == source) & ~failed].mean())
            for source in np.unique(sources[~failed])
            for name, column in found.items()
        }
        return means | {"val-aux/failed_rows": float(failed.sum())}

    def _samples(self, parts: Sequence[ScoredResponses]) -> list[dict[str, object]]:
        rows = (row for part in parts for row in part.rows(0))
        return [
            {
                "input": row["input"],
                "output": row["output"],
                "ground_truth": row["gts"],
                "score": row["score"],
            }
            for row in islice(rows, self.config.trainer.log_val_generations)
        ]
