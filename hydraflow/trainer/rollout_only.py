"""Training steps reduced to sampling and scoring: `trainer.debug.rollout_only`.

In: trajectories from a source. Out: their metrics. Each step samples what the first step of a training run
would sample for the same prompts, because the weights stay those of model.path.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.dispatch.runtime import Runtime
from hydraflow.protocol.ragged import lengths
from hydraflow.protocol.remote import RemoteBatch
from hydraflow.trainer.generations import GenerationDump, read_scored
from hydraflow.trainer.ppo import columns
from hydraflow.trainer.source import Trajectories, TrajectorySource, check_failures, checked, scores_of
from hydraflow.trainer.timing import PhaseTimer
from hydraflow.workers.advantage import count_ends, is_faulted, spread
from hydraflow.workers.reward import FUNCTION_MEANS, WHY_FAILED


class RolloutTrainer:
    """A trainer for the loop with a generation engine and a reward function only."""

    def __init__(
        self,
        plan: BatchPlan,
        runtime: Runtime,
        source: TrajectorySource,
        dump: GenerationDump | None,
        max_failed_share: float,
    ):
        self.plan, self.runtime, self.source = plan, runtime, source
        self.dump, self.max_failed_share = dump, max_failed_share
        self.timer = PhaseTimer(runtime.timeline)
        self.version = 0

    def begin(self, step: int) -> None:
        """Does nothing: the weights never change."""

    def step(self, step: int, interrupt: Callable[[], None]) -> dict[str, float]:
        """Samples and scores one step's prompts; `step` counts from 1. An exception from `interrupt` ends the
        step."""
        phase = partial(self.timer.phase, step=step)
        with phase("step"), self.runtime.interruptible(interrupt):
            with phase("gen"):
                taken = checked(self.source.take(step))
            with phase("reward"):
                scored = scores_of(taken)
        if self.dump is not None:
            self.dump.write(step, list(read_scored(self.runtime, taken).rows(step)))
        metrics = self._measured(taken, scored) | (scored.meta_info.get(FUNCTION_MEANS) or {})
        metrics |= self.timer.drain()
        failed, why = int(metrics["reward/failed_rows"]), scored.meta_info.get(WHY_FAILED)
        most, so = self.max_failed_share, "no more are sampled"
        check_failures(failed, len(taken.rows), why, most, where=f"step {step}", so=so)
        tokens, seconds = metrics["perf/total_num_tokens"], metrics["timing_s/step"]
        return metrics | {
            "perf/time_per_step": seconds,
            "perf/throughput": tokens / seconds / self.plan.rollout_devices,
        }

    def _measured(self, taken: Trajectories, scored: RemoteBatch) -> dict[str, float]:
        """Scores are averaged over the rows that have one: neither failed nor faulted."""
        scores = self.runtime.fetch(columns(scored, ["score", "failed"]))
        read = self.runtime.fetch(columns(taken.rows, ["lengths", "response_mask", "finish_reason"]))
        responses = lengths(read.get("response_mask"))
        failed = scores.get("failed") | ~scores.get("score").isfinite()
        found = {
            "reward/failed_rows": float(failed.sum()),
            "perf/total_num_tokens": float(read.get("lengths").sum()),
        }
        answered = ~failed & ~is_faulted(read.get("finish_reason"))
        if answered.any():
            found |= spread("critic/score", scores.get("score")[answered])
        return found | count_ends(read.get("finish_reason")) | spread("response_length", responses)
