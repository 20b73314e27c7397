"""One training step, phase by phase. What happens between steps (validate, log, stop) is in `loop.py`.

In: a batch of prompts. Out: new weights and the step's metrics. The batch holds references to columns that
stay in the workers' object stores; the controller reads sequence lengths and nothing else of them. The
phases are listed in `phases.py`, with the columns that each reads and adds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from hydraflow import metrics as reductions
from hydraflow.batch_plan.parts import RolePlan
from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.dispatch.group import RoleGroup
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.shards import CompletedFuture, Future
from hydraflow.dispatch.transport import Traffic
from hydraflow.errors import GuardStop
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.remote import RemoteBatch
from hydraflow.rewards.failures import require_scored
from hydraflow.schema import PPOConfig
from hydraflow.trainer.generations import GenerationDump, read_scored
from hydraflow.trainer.mini_batches import mini_batch_order
from hydraflow.trainer.phases import step_phases
from hydraflow.trainer.roles import Roles, old_is_rollout
from hydraflow.trainer.rollouts import Rollouts
from hydraflow.trainer.timing import PhaseTimer
from hydraflow.workers.actor import ActorWorker
from hydraflow.workers.advantage import AdvantageWorker
from hydraflow.workers.critic import CriticWorker
from hydraflow.workers.reference import ReferenceWorker
from hydraflow.workers.rollout import RolloutWorker

logger = logging.getLogger(__name__)


class PPOTrainer:
    """The step of PPO, GRPO, RLOO and REINFORCE++; they differ in the advantage estimator and in whether
    there is a critic."""

    def __init__(
        self,
        config: PPOConfig,
        plan: BatchPlan,
        roles: Roles,
        runtime: Runtime,
        rollouts: Rollouts,
        dump: GenerationDump | None,
    ):
        self.config, self.plan, self.roles = config, plan, roles
        self.runtime, self.rollouts, self.dump = runtime, rollouts, dump
        self.reads = {phase.name: phase.reads for phase in step_phases(config)}
        """Phase -> the columns passed to it; phases that the run does not need are absent."""
        self.timer = PhaseTimer(runtime.timeline)
        self.metrics: dict[str, float] = {}
        self.kl: dict[str, float] = {}
        """The KL controller's state after the last step."""
        self._compared = False
        """Whether this start has compared the generation engine's log-probabilities with the trainer's."""

    def step(self, prompts: DataProto, step: int, interrupt: Callable[[], None]) -> dict[str, float]:
        """Trains on one batch of prompts; `step` counts from 1.

        An exception from `interrupt` ends the step before any weight has changed.
        """
        phase = partial(self.timer.phase, step=step)
        self.metrics = {}
        before = self.runtime.traffic()
        with phase("step"):
            with phase("gen"):
                sampling = self.rollouts.sampling(prompts, step)
                # behind the samples, beside the passes of the models
                scoring = self.rollouts.score(prompts, sampling, step)
                batch = self.rollouts.generated(prompts, sampling)
            with self.runtime.interruptible(interrupt):  # reward functions may sleep or hang
                batch = self.experience(batch, scoring, prompts, step)
            with phase("update_critic"):
                self.update_critic(batch, step)
            updating = self.update_actor(batch, step)
            syncing = self.sync_weights()  # behind the update
            with phase("update_actor"):
                self.note_update(updating)
            with phase("update_weights"):
                syncing.get()
        return self.metrics | self._throughput(self.timer.drain(), before)

    def experience(self, batch: RemoteBatch, scoring: Future, prompts: DataProto, step: int) -> RemoteBatch:
        """The batch that the updates learn from. Building it changes no lasting state, so a step can be
        abandoned here."""
        phase = partial(self.timer.phase, step=step)
        with phase("old_log_prob"):
            batch = self.old_log_probs(batch, step)
        with phase("ref"):
            batch = self.reference_log_probs(batch)
        with phase("values"):
            batch = self.critic_values(batch)
        estimating = self.advantages(batch, scoring)  # behind the scores
        with phase("reward"):
            self.note_scores(prompts, scoring.get(), step)
        with phase("adv"):
            batch = batch.union(self.noted(estimating.get()))
        return batch

    def sync_weights(self) -> Future:
        """Sends the actor's weights to the generation engine, if there is one, after all updates called
        before."""
        if self.roles.rollout is None:
            return CompletedFuture(None)
        syncing: Future = self.roles.rollout.call(RolloutWorker.sync_from_actor)
        return syncing

    def note_scores(self, prompts: DataProto, scored: RemoteBatch, step: int) -> None:
        """Counts and logs the rows that the reward function failed on; dumps the responses if configured.

        GuardStop if too many failed: the step has changed no weight yet.
        """
        if self.dump is not None:
            self.dump.write(
                step,
                list(read_scored(self.runtime, prompts, self.plan.samples_per_prompt, scored).rows(step)),
            )
        self.metrics["reward/failed_rows"] = float(scored.meta_info["failed"])
        judge_failures(
            [scored], self.config.reward.max_failed_share, f"step {step}", "nothing was trained on them"
        )

    def old_log_probs(self, batch: RemoteBatch, step: int) -> RemoteBatch:
        """Adds the sampling policy's log-probabilities.

        Where the generation engine computes them exactly as the trainer does (same code, same dtype), its own
        are used and compared with the trainer's in the first mini-batch; otherwise the trainer computes
        them. The first step after a start always computes them, and stops the run if the two disagree.
        """
        exact = old_is_rollout(self.config, self.runtime.device_type)
        if self._compared and exact:
            return _taken_from_rollout(batch)
        computed = batch.union(
            self.roles.actor.call(ActorWorker.compute_log_prob, columns(batch, self.reads["log-probs"]))
        )
        measured = self._compare_with_rollout(computed)
        if step == 1 or not exact:  # a resumed run logs what it would have without the stop
            self.metrics |= measured
        return _taken_from_rollout(computed) if exact else computed

    def reference_log_probs(self, batch: RemoteBatch) -> RemoteBatch:
        """Adds the reference policy's log-probabilities, if a KL term needs them."""
        if "reference" not in self.reads:
            return batch
        inputs = columns(batch, self.reads["reference"])
        if self.roles.ref is None:
            return batch.union(self.roles.actor.call(ActorWorker.compute_ref_log_prob, inputs))
        return batch.union(self.roles.ref.call(ReferenceWorker.compute_ref_log_prob, inputs))

    def critic_values(self, batch: RemoteBatch) -> RemoteBatch:
        """Adds the critic's values, if there is one."""
        if self.roles.critic is None:
            return batch
        inputs = columns(batch, self.reads["values"])
        return batch.union(self.roles.critic.call(CriticWorker.compute_values, inputs))

    def advantages(self, batch: RemoteBatch, scored: Future) -> Future:
        """Rewards, advantages and returns."""
        inputs = columns(batch, self.reads["advantages"])
        return self.roles.advantage.call(AdvantageWorker.compute, inputs, scored)

    def noted(self, output: RemoteBatch) -> RemoteBatch:
        """Records the metrics and the KL controller's state of an output, and returns it."""
        self.metrics |= output.meta_info["metrics"]
        self.kl = output.meta_info["kl"]
        return output

    def update_critic(self, batch: RemoteBatch, step: int) -> None:
        """Takes the critic's optimizer steps."""
        if self.roles.critic is None or self.plan.critic is None:
            return
        inputs = columns(batch, self.reads["critic"])
        self.note_update(self._update(self.roles.critic, CriticWorker.update, inputs, self.plan.critic, step))

    def update_actor(self, batch: RemoteBatch, step: int) -> Future | None:
        """Takes the actor's optimizer steps, from step `trainer.critic_warmup` on."""
        if step < self.plan.actor.first_step:
            return None
        inputs = columns(batch, self.reads["actor"])
        return self._update(self.roles.actor, ActorWorker.update, inputs, self.plan.actor, step)

    def note_update(self, updating: Future | None) -> None:
        """Waits for an update and keeps its metrics."""
        if updating is not None:
            self.metrics |= reductions.values(updating.get())

    def _update(
        self, role: RoleGroup, method: Callable, batch: RemoteBatch, plan: RolePlan, step: int
    ) -> Future:
        lengths = self.runtime.fetch(columns(batch, ["lengths"])).get("lengths").numpy()
        order = mini_batch_order(
            lengths,
            plan,
            self.plan.samples_per_prompt,
            balance=self.config.trainer.balance_batch,
            shuffle_key=(self.config.trainer.seed, step) if plan.shuffle else None,
        )
        inputs = columns(batch, [name for name in batch.keys() if name != "lengths"])
        return role.call(method, inputs.select_idxs(order), step)

    def _compare_with_rollout(self, batch: RemoteBatch) -> dict[str, float]:
        names = ["response_mask", "rollout_log_probs", "old_log_probs", "entropys"]
        measured = self.roles.advantage.call(AdvantageWorker.compare_with_rollout, columns(batch, names))
        limit = self.config.actor_rollout_ref.rollout.probs_diff_limit
        found = measured["training/rollout_probs_diff_mean"]
        if not self._compared and found > limit:
            raise GuardStop(
                "the generation engine and the trainer disagree: sampled tokens' probabilities differ by"
                f" {found:.4f} on average, actor_rollout_ref.rollout.probs_diff_limit is {limit}. Usual"
                " causes: weights that did not arrive, another chat template or tokenizer, different dtypes."
            )
        self._compared = True
        return measured

    def _throughput(self, seconds: dict[str, float], before: Traffic) -> dict[str, float]:
        """`perf/throughput` is tokens per second and process, as in verl.

        `perf/dispatch_share`: share of the step in which no worker's method ran: the controller's and Ray's
        own time; 0 where concurrent methods add up to more than the step.
        """
        trajectories = self.plan.trajectories_per_step
        tokens = trajectories * (self.metrics["prompt_length/mean"] + self.metrics["response_length/mean"])
        per_step, now = seconds["timing_s/step"], self.runtime.traffic()
        perf = {
            "perf/total_num_tokens": tokens,
            "perf/time_per_step": per_step,
            "perf/throughput": tokens / per_step / self.plan.rollout_ranks,
            "perf/dispatch_share": max(0.0, 1 - (now.worked - before.worked) / per_step),
            "perf/controller_bytes_per_trajectory": (now.total - before.total) / trajectories,
        }
        return seconds | perf


def judge_failures(scored: Sequence[RemoteBatch], most: float, where: str, so: str) -> None:
    """Logs how many rows the reward function failed on, and the first error; GuardStop when they are more
    than the share `most`. `so`: the consequence, for the message.
    """
    failed, rows = sum(batch.meta_info["failed"] for batch in scored), sum(map(len, scored))
    first = next((batch.meta_info["why_failed"] for batch in scored if batch.meta_info["failed"]), None)
    require_scored(failed, rows, first, most, where=where, so=so)
    if failed:
        logger.warning("%s: the reward function failed on %d of %d rows: %s", where, failed, rows, first)


def columns(batch: RemoteBatch, names: Sequence[str]) -> RemoteBatch:
    """Only those columns; row objects and meta_info are dropped."""
    return batch.select(names, [], [])


def _taken_from_rollout(batch: RemoteBatch) -> RemoteBatch:
    """The batch with the generation engine's log-probabilities as the old ones."""
    taken = RemoteBatch(dict(batch.columns), batch.objects, batch.meta_info)
    taken.columns["old_log_probs"] = batch.columns["rollout_log_probs"]
    return taken
