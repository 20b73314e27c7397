"""Steps that sample and score, and train nothing: `trainer.debug.rollout_only`.

In: trajectories from a source. Out: their metrics. Each step samples what the first step of a training run
would sample for the same prompts, because the weights stay those of model.path.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.dispatch.runtime import Runtime
from hydraflow.protocol.ragged import lengths
from hydraflow.trainer.failures import judge_failures
from hydraflow.trainer.generations import GenerationDump, read_scored
from hydraflow.trainer.ppo import columns
from hydraflow.trainer.source import Trajectories, TrajectorySource
from hydraflow.trainer.timing import PhaseTimer
from hydraflow.workers.advantage import count_ends, spread


class RolloutTrainer:
    """Does what the loop asks of a trainer, with the generation engine and the reward function alone."""

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
        with phase("step"):
            with phase("gen"):
                taken = self.source.take(step)
            with phase("reward"), self.runtime.interruptible(interrupt):
                scored = taken.scoring.get()
        if self.dump is not None:
            self.dump.write(step, list(read_scored(self.runtime, taken).rows(step)))
        judge_failures([scored], self.max_failed_share, f"step {step}", "no more are sampled")
        metrics = self._measured(taken) | self.timer.drain()
        tokens, seconds = metrics["perf/total_num_tokens"], metrics["timing_s/step"]
        return metrics | {
            "perf/time_per_step": seconds,
            "perf/throughput": tokens / seconds / self.plan.rollout_ranks,
        }

    def _measured(self, taken: Trajectories) -> dict[str, float]:
        scored = taken.scoring.get()
        scores = self.runtime.fetch(columns(scored, ["score"])).get("score")
        read = self.runtime.fetch(columns(taken.rows, ["lengths", "response_mask", "finish_reason"]))
        responses = lengths(read.get("response_mask"))
        found = {
            "reward/failed_rows": float(scored.meta_info["failed"]),
            "perf/total_num_tokens": float(read.get("lengths").sum()),
        }
        found |= count_ends(read.get("finish_reason"))
        return found | spread("critic/score", scores) | spread("response_length", responses)
