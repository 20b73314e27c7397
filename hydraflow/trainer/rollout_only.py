"""Steps that sample and score, and train nothing: `trainer.debug.rollout_only`.

In: a batch of prompts. Out: the metrics of its trajectories. Each step samples what the first step of a
training run would sample for the same prompts and step number, because the weights stay those of model.path.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.shards import CompletedFuture, Future
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.ragged import lengths
from hydraflow.protocol.remote import RemoteBatch
from hydraflow.trainer.generations import GenerationDump, read_scored
from hydraflow.trainer.ppo import columns, judge_failures
from hydraflow.trainer.rollouts import Rollouts
from hydraflow.trainer.timing import PhaseTimer
from hydraflow.workers.advantage import spread


class RolloutTrainer:
    """Does what the loop asks of a trainer, with the generation engine and the reward function alone."""

    def __init__(
        self,
        plan: BatchPlan,
        runtime: Runtime,
        rollouts: Rollouts,
        dump: GenerationDump | None,
        max_failed_share: float,
    ):
        self.plan, self.runtime, self.rollouts = plan, runtime, rollouts
        self.dump, self.max_failed_share = dump, max_failed_share
        self.timer = PhaseTimer(runtime.timeline)

    def sync_weights(self) -> Future:
        """Does nothing: the weights never change."""
        return CompletedFuture(None)

    def step(self, prompts: DataProto, step: int, interrupt: Callable[[], None]) -> dict[str, float]:
        """Samples and scores one batch of prompts; `step` counts from 1. An exception from
        `interrupt` ends the step."""
        phase = partial(self.timer.phase, step=step)
        with phase("step"):
            with phase("gen"):
                sampling = self.rollouts.sampling(prompts, step)
                scoring = self.rollouts.score(prompts, sampling, step)
                batch = self.rollouts.generated(prompts, sampling)
            with phase("reward"), self.runtime.interruptible(interrupt):
                scored = scoring.get()
        if self.dump is not None:
            self.dump.write(
                step,
                list(read_scored(self.runtime, prompts, self.plan.samples_per_prompt, scored).rows(step)),
            )
        judge_failures([scored], self.max_failed_share, f"step {step}", "no more are sampled")
        metrics = self._measured(batch, scored) | self.timer.drain()
        tokens, seconds = metrics["perf/total_num_tokens"], metrics["timing_s/step"]
        return metrics | {
            "perf/time_per_step": seconds,
            "perf/throughput": tokens / seconds / self.plan.rollout_ranks,
        }

    def _measured(self, batch: RemoteBatch, scored: RemoteBatch) -> dict[str, float]:
        scores = self.runtime.fetch(columns(scored, ["score"])).get("score")
        read = self.runtime.fetch(columns(batch, ["lengths", "response_mask"]))
        responses = lengths(read.get("response_mask"))
        found = {
            "reward/failed_rows": float(scored.meta_info["failed"]),
            "perf/total_num_tokens": float(read.get("lengths").sum()),
        }
        return found | spread("critic/score", scores) | spread("response_length", responses)
