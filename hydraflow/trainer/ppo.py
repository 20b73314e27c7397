"""One training step, phase by phase. What happens between steps (validate, log, stop) is in `loop.py`.

In: trajectories from a source. Out: new weights and the step's metrics. The batch holds references to columns
that stay in the workers' object stores; the controller reads sequence lengths and nothing else of them. The
phases are listed in `phases.py`, with the columns that each reads and adds.

Some calls return futures. A group's processes carry out its calls in the order in which they were made, and a
future passed to another group is waited for there, not here. So scores are computed beside the models'
passes, advantages wait for them in their own process, and the new weights go out behind the last update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from hydraflow import metrics as reductions
from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.dispatch.group import RoleGroup
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.shards import CompletedFuture, Future
from hydraflow.dispatch.transport import Traffic
from hydraflow.errors import GuardStop
from hydraflow.protocol.remote import RemoteBatch
from hydraflow.schema import PPOConfig
from hydraflow.trainer.failures import judge_failures
from hydraflow.trainer.generations import GenerationDump, read_scored
from hydraflow.trainer.mini_batches import cut_mini_batches, dispatched
from hydraflow.trainer.phases import step_phases
from hydraflow.trainer.roles import Roles, old_is_rollout
from hydraflow.trainer.source import Trajectories, TrajectorySource
from hydraflow.trainer.timing import PhaseTimer
from hydraflow.workers.actor import ActorWorker
from hydraflow.workers.advantage import AdvantageWorker
from hydraflow.workers.critic import CriticWorker
from hydraflow.workers.reference import ReferenceWorker
from hydraflow.workers.rollout import RolloutWorker


class PPOTrainer:
    """The step of PPO, GRPO, RLOO and REINFORCE++; they differ in the advantage estimator and in whether
    there is a critic."""

    def __init__(
        self,
        config: PPOConfig,
        plan: BatchPlan,
        roles: Roles,
        runtime: Runtime,
        source: TrajectorySource,
        dump: GenerationDump | None,
    ):
        self.config, self.plan, self.roles = config, plan, roles
        self.runtime, self.source, self.dump = runtime, source, dump
        self.reads = {phase.name: phase.reads for phase in step_phases(config)}
        """Phase -> the columns passed to it; phases that the run does not need are absent."""
        self.timer = PhaseTimer(runtime.timeline)
        self.metrics: dict[str, float] = {}
        self.kl: dict[str, float] = {}
        """The KL controller's state after the last step."""
        self._compared = False
        """Whether this start has compared the generation engine's log-probabilities with the trainer's."""

    def step(self, step: int, interrupt: Callable[[], None]) -> dict[str, float]:
        """Training step `step`, which counts from 1.

        An exception from `interrupt` ends the step before any weight has changed.
        """
        phase = partial(self.timer.phase, step=step)
        self.metrics = {}
        before = self.runtime.traffic()
        with phase("step"):
            with phase("gen"):
                taken = self.source.take(step)
            with self.runtime.interruptible(interrupt):  # reward functions may sleep or hang
                batch = self.experience(taken, step)
            with phase("update_critic"):
                self.update_critic(batch, step)
            updating = self.update_actor(batch, step)
            syncing = self.sync_weights()  # behind the update
            with phase("update_actor"):
                self.note_update(updating)
            with phase("update_weights"):
                syncing.get()
        return self.metrics | self._throughput(batch, self.timer.drain(), before)

    def experience(self, taken: Trajectories, step: int) -> RemoteBatch:
        """The batch that the updates learn from. Building it changes no lasting state, so a step can be
        abandoned here."""
        phase = partial(self.timer.phase, step=step)
        with phase("old_log_prob"):
            batch = self.old_log_probs(taken.rows, step)
        with phase("ref"):
            batch = self.reference_log_probs(batch)
        with phase("values"):
            batch = self.critic_values(batch)
        estimating = self.advantages(batch, taken.scoring)  # behind the scores
        with phase("reward"):
            self.note_scores(taken, step)
        with phase("adv"):
            batch = batch.union(self.noted(estimating.get()))
        return batch

    def begin(self, step: int) -> None:
        """Gives the generation engine the actor's weights, those after `step` steps."""
        self.sync_weights().get()

    def sync_weights(self) -> Future:
        """Sends the actor's weights to the generation engine, if there is one, after all updates called
        before."""
        if self.roles.rollout is None:
            return CompletedFuture(None)
        syncing: Future = self.roles.rollout.call(RolloutWorker.sync_from_actor)
        return syncing

    def note_scores(self, taken: Trajectories, step: int) -> None:
        """Counts and logs the rows that the reward function failed on; dumps the responses if configured.

        GuardStop if too many failed: the step has changed no weight yet.
        """
        scored = taken.scoring.get()
        if self.dump is not None:
            self.dump.write(step, list(read_scored(self.runtime, taken).rows(step)))
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
        if self.roles.critic is None:
            return
        self.note_update(self._update("critic", self.roles.critic, CriticWorker.update, batch, step))

    def update_actor(self, batch: RemoteBatch, step: int) -> Future | None:
        """Takes the actor's optimizer steps, from step `trainer.critic_warmup` on."""
        if step < self.plan.actor.first_step:
            return None
        return self._update("actor", self.roles.actor, ActorWorker.update, batch, step)

    def note_update(self, updating: Future | None) -> None:
        """Waits for an update and keeps its metrics."""
        if updating is not None:
            self.metrics |= reductions.values(updating.get())

    def _update(self, name: str, role: RoleGroup, method: Callable, batch: RemoteBatch, step: int) -> Future:
        plan = self.plan.critic if name == "critic" else self.plan.actor
        assert plan is not None, "a role that learns has a plan"
        known = self.runtime.fetch(columns(batch, ["lengths", "group"]))
        cut = cut_mini_batches(
            known.get("lengths").numpy(),
            known.get("group").numpy(),
            plan,
            balance=self.config.trainer.balance_batch,
            shuffle_key=(self.config.trainer.seed, step) if plan.shuffle else None,
        )
        inputs = columns(batch, [column for column in self.reads[name] if column != "lengths"])
        return role.call(method, dispatched(inputs, cut, plan), step)

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

    def _throughput(self, batch: RemoteBatch, seconds: dict[str, float], before: Traffic) -> dict[str, float]:
        """`perf/throughput` is tokens per second and process, as in verl.

        `perf/dispatch_share`: share of the step in which no worker's method ran: the controller's and Ray's
        own time; 0 where concurrent methods add up to more than the step.
        """
        rows = len(batch)
        tokens = rows * (self.metrics["prompt_length/mean"] + self.metrics["response_length/mean"])
        per_step, now = seconds["timing_s/step"], self.runtime.traffic()
        perf = {
            "perf/total_num_tokens": tokens,
            "perf/time_per_step": per_step,
            "perf/throughput": tokens / per_step / self.plan.rollout_ranks,
            "perf/dispatch_share": max(0.0, 1 - (now.worked - before.worked) / per_step),
            "perf/controller_bytes_per_trajectory": (now.total - before.total) / rows,
        }
        return seconds | perf


def columns(batch: RemoteBatch, names: Sequence[str]) -> RemoteBatch:
    """Only those columns; row objects and meta_info are dropped."""
    return batch.select(names, [], [])


def _taken_from_rollout(batch: RemoteBatch) -> RemoteBatch:
    """The batch with the generation engine's log-probabilities as the old ones."""
    taken = RemoteBatch(dict(batch.columns), batch.objects, batch.meta_info)
    taken.columns["old_log_probs"] = batch.columns["rollout_log_probs"]
    return taken
