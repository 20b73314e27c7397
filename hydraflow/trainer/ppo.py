"""One training step, phase by phase. What happens between steps (validate, log, stop) is in `loop.py`.

In: trajectories from a source. Out: new weights and the step's metrics. The batch holds references to columns
that stay in the workers' object stores; the controller reads lengths, groups and versions, and scores and
texts only if responses are dumped as text. The phases are listed in `phases.py`, with the columns that each
reads and adds.

Some calls return futures. A group's processes run its calls in order, and a future passed to another group is
awaited there, not here. So the reward function runs alongside the models' passes, and the transfer of the new
weights is queued behind the last update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np

from hydraflow import metrics as reductions
from hydraflow.algorithms.config import OldFrom
from hydraflow.algorithms.entropy_control import EntropyController
from hydraflow.batch_plan.parts import RolePlan
from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.device import resolve_dtype
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.shards import Future
from hydraflow.dispatch.transport import Traffic
from hydraflow.errors import GuardStop
from hydraflow.generation.config import GENERATION_ENGINES
from hydraflow.protocol.remote import RemoteBatch
from hydraflow.schema import PPOConfig
from hydraflow.trainer.generations import GenerationDump, read_scored
from hydraflow.trainer.mini_batches import cut_mini_batches, dispatched
from hydraflow.trainer.phases import (
    LENGTHS,
    old_from,
    rollout_is_exact,
    sampled_too,
    score_columns,
    step_phases,
)
from hydraflow.trainer.roles import Roles
from hydraflow.trainer.source import Trajectories, TrajectorySource, check_failures, checked, scores_of
from hydraflow.trainer.timing import PhaseTimer
from hydraflow.workers.actor import ENTROPY_COEFF, OLD_FROM, ActorWorker
from hydraflow.workers.advantage import AdvantageWorker, RolloutComparison
from hydraflow.workers.critic import CriticWorker
from hydraflow.workers.engine_worker import EngineWorker
from hydraflow.workers.reference import ReferenceWorker
from hydraflow.workers.reward import FUNCTION_MEANS, WHY_FAILED
from hydraflow.workers.teacher import TeacherWorker
from hydraflow.workers.training import TrainedWorker


class PPOTrainer:
    """The training step of PPO, GRPO and all other algorithms, which differ in the phases and columns that
    they need."""

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
        self.sampled_too = sampled_too(config)
        self.timer = PhaseTimer(runtime.timeline)
        self.metrics: dict[str, float] = {}
        self.version = 0
        """Version of the weights that the generation engine holds."""
        self.of_advantages: dict[str, dict[str, float]] = {}
        """State of the advantage worker after the last step."""
        actor = config.actor_rollout_ref.actor
        self.entropy = None
        """Controls the coefficient of the entropy bonus; None: it is constant."""
        if actor.adaptive_entropy.enabled:
            self.entropy = EntropyController(actor.entropy_coeff, actor.adaptive_entropy)
        self.entropy_coeff: float | None = None
        """Entropy coefficient of this step; None: as configured."""
        self.exact = rollout_is_exact(config, lambda name: resolve_dtype(name, runtime.device_type).itemsize)
        self.old = OldFrom.RECOMPUTE
        """Where this step's old log-probabilities come from."""
        self._compared = False
        """Whether this start has compared the generation engine's log-probabilities with the trainer's."""

    def step(self, step: int, interrupt: Callable[[], None]) -> dict[str, float]:
        """Training step `step`, which counts from 1.

        An exception from `interrupt` ends the step before any weight has changed.
        """
        phase = partial(self.timer.phase, step=step)
        self.metrics = {}
        before, entropy = self.runtime.traffic(), self.controllers()["entropy"]
        with phase("step"):
            try:
                with self.runtime.interruptible(interrupt):  # reward functions may sleep or hang
                    with phase("gen"):
                        taken = checked(self.source.take(step), self.sampled_too)
                    known = self.runtime.fetch(columns(taken.rows, [*known_of(taken.rows), "versions"]))
                    taken.rows.columns |= RemoteBatch.from_local(known).columns  # held here from now on
                    batch = self.experience(taken, step)
            except BaseException:
                self.restore(entropy)  # a checkpoint of the step before may follow
                raise
            with phase("update_critic"):
                self.update_critic(batch, step)
            updating = self.update_actor(batch, step)
            wait = self.roles.link.publish(step)  # queued behind the update
            with phase("update_actor"):
                self.note_update(updating)
            # queued behind their passes; awaited where nothing else is left to do
            frozen = [group.call(EngineWorker.utilization_metrics) for group in self.roles.frozen]
            with phase("update_weights"):
                self.published(step, wait)
                self.metrics |= reductions.values(reductions.merge([passed.get() for passed in frozen]))
        tokens = int(known.get("lengths").sum())
        return self.metrics | self._throughput(tokens, len(known), self.timer.drain(), before)

    def experience(self, taken: Trajectories, step: int) -> RemoteBatch:
        """The batch that the updates learn from. Building it changes no weight, so a step can be abandoned
        here."""
        phase = partial(self.timer.phase, step=step)
        with phase("old_log_prob"):
            batch = self.old_log_probs(taken, step)
        with phase("ref"):
            batch = self.reference_log_probs(batch)
        if self.roles.teachers:
            with phase("teachers"):
                batch = self.teacher_log_probs(batch)
        with phase("values"):
            batch = self.critic_values(batch)
        with phase("reward"):
            scored = scores_of(taken, score_columns(self.config))
        if self.dump is not None:
            self.dump.write(step, list(read_scored(self.runtime, taken).rows(step)))
        with phase("adv"):
            estimated = self.advantages(batch, scored)
        self.metrics |= scored.meta_info.get(FUNCTION_MEANS) or {}
        failed, why = int(self.metrics["reward/failed_rows"]), scored.meta_info.get(WHY_FAILED)
        most, so = self.config.reward.max_failed_share, "nothing was trained on them"
        unscored = estimated.meta_info["unscored"]
        check_failures(failed, len(batch), why, most, where=f"step {step}", so=so, unscored=unscored)
        if left_out := estimated.meta_info["left_out"]:
            batch = batch.select_idxs(np.delete(np.arange(len(batch)), left_out))
        return batch.union(estimated)

    def begin(self, step: int) -> None:
        """Sends the actor's weights to the generation engine; `step`: training steps that are done."""
        self.published(step, self.roles.link.publish(step))

    def published(self, version: int, wait: Callable[[], None]) -> None:
        """Waits until the generation engine has the weights; `version`: their number of training steps."""
        wait()
        self.version = version
        self.source.published(version)

    def old_log_probs(self, taken: Trajectories, step: int) -> RemoteBatch:
        """The rows, with `old_log_probs` if they are known before the update. Sets `self.old`, their source.

        The first fresh batch after a start always computes them, and stops the run if they disagree with the
        generation engine's. Every replayed batch computes them too, and uses the recorded ones only if they
        are close enough: the run that sampled it may have had other weights. With
        `rollout_correction.bypass_mode` the recorded ones are always used.
        """
        known = self.runtime.fetch(columns(taken.rows, ["group", "versions"]))
        newest = bool((known.get("versions") == self.version).all())
        mini_batches = -(-len(known.get("group").unique()) // self.plan.actor.mini_batch_prompts)
        exact = self.exact and newest
        self.old = old_from(self.config, self.plan, exact=exact, mini_batches=mini_batches)
        is_needed = self.old == OldFrom.RECOMPUTE or self.entropy is not None
        if self._compared and not taken.replayed and not is_needed:
            return self.with_old(taken.rows)
        if not self.sampled_too:  # a trajectory file may contain them from a run that used them
            taken.rows.columns.pop("routed_experts", None)
        batch = taken.rows.union(
            self.roles.actor.call(ActorWorker.compute_log_prob, columns(taken.rows, self.reads["log-probs"]))
        )
        compared = self._compare_with_rollout(batch)
        self._control_entropy(compared.metrics)
        limit = self.config.actor_rollout_ref.rollout.probs_diff_limit
        if compared.by_replica and max(compared.by_replica.values()) > limit:
            if newest and not taken.replayed and not self._compared:
                raise GuardStop(self._disagreement(compared.by_replica, limit))
            if not self.config.algorithm.rollout_correction.bypass_mode:
                self.old = OldFrom.RECOMPUTE
        elif compared.by_replica and newest and not taken.replayed:
            self._compared = True
        # not at each start: a resumed run logs the same metrics as an uninterrupted one
        if step == 1 or self.old == OldFrom.RECOMPUTE:
            self.metrics |= compared.metrics
            # otherwise the update's own pass measures them, without a breakdown by replica
            if self.old != OldFrom.ROLLOUT:
                self.metrics |= compared.of_replicas
        return self.with_old(batch)

    def with_old(self, batch: RemoteBatch) -> RemoteBatch:
        """The batch, with the generation engine's log-probabilities as the old ones if those are used."""
        if self.old == OldFrom.ROLLOUT:
            batch.columns["old_log_probs"] = batch.columns["rollout_log_probs"]
        return batch

    def reference_log_probs(self, batch: RemoteBatch) -> RemoteBatch:
        """Adds the reference policy's log-probabilities, if a KL term or the policy loss needs them."""
        if "reference" not in self.reads:
            return batch
        inputs = columns(batch, self.reads["reference"])
        if self.roles.ref is None:
            return batch.union(self.roles.actor.call(ActorWorker.compute_ref_log_prob, inputs))
        return batch.union(self.roles.ref.call(ReferenceWorker.compute_ref_log_prob, inputs))

    def teacher_log_probs(self, batch: RemoteBatch) -> RemoteBatch:
        """Adds the columns that each row's teacher computes."""
        inputs, teachers = columns(batch, self.reads["teachers"]), self.roles.teachers
        sources = batch.objects["data_source"]
        taught = np.array([teacher_of(source, teachers) for source in sources])
        if None in taught:  # rows of a trajectory file may have sources that data.train_files does not
            raise GuardStop(f"no teacher is for the data source {sources[list(taught).index(None)]!r}")
        parts, order = [], []
        for name, group in teachers.items():
            rows = np.flatnonzero(taught == name)
            if len(rows):
                order.append(rows)
                parts.append(group.call(TeacherWorker.judge, inputs.select_idxs(rows)))
        return batch.union(RemoteBatch.concat(parts).select_idxs(np.argsort(np.concatenate(order))))

    def critic_values(self, batch: RemoteBatch) -> RemoteBatch:
        """Adds the critic's values, if there is one."""
        if self.roles.critic is None:
            return batch
        inputs = columns(batch, self.reads["values"])
        return batch.union(self.roles.critic.call(CriticWorker.compute_values, inputs))

    def advantages(self, batch: RemoteBatch, scored: RemoteBatch) -> RemoteBatch:
        """Rewards, advantages and returns. The scores are awaited before the call, because the process that
        computes advantages also saves checkpoints and must not block."""
        inputs = columns(batch, self.reads["advantages"])
        estimated: RemoteBatch = self.roles.advantage.call(
            AdvantageWorker.compute, inputs, columns(scored, score_columns(self.config))
        )
        self.metrics |= estimated.meta_info["metrics"]
        self.of_advantages = estimated.meta_info["state"]
        return estimated

    def update_critic(self, batch: RemoteBatch, step: int) -> None:
        if self.roles.critic is None:
            return
        assert self.plan.critic is not None, "a critic has a plan"
        if not len(batch):
            self.roles.critic.call(TrainedWorker.skip_step)
            return
        inputs = self.mini_batched(batch, self.reads["critic"], self.plan.critic, step)
        self.note_update(self.roles.critic.call(CriticWorker.update, inputs, step))

    def update_actor(self, batch: RemoteBatch, step: int) -> Future | None:
        """Starts the actor's optimizer steps. None: there are none, because of `trainer.critic_warmup` or
        because all rows failed and `reward.max_failed_share` allows it."""
        if step < self.plan.actor.first_step:
            return None
        if not len(batch):
            self.roles.actor.call(TrainedWorker.skip_step)
            return None
        names = list(self.reads["actor"])
        if self.old == OldFrom.FIRST_PASS:
            names.remove("old_log_probs")
            names = list(dict.fromkeys([*names, "rollout_log_probs", "replica"]))  # needed for the comparison
        inputs = self.mini_batched(batch, names, self.plan.actor, step)
        inputs.meta_info[OLD_FROM] = self.old
        if self.entropy_coeff is not None:
            inputs.meta_info[ENTROPY_COEFF] = self.entropy_coeff
        return self.roles.actor.call(ActorWorker.update, inputs, step)

    def note_update(self, updating: Future | None) -> None:
        """Waits for an update and keeps its metrics; `actor/entropy` remains the one that sets the
        coefficient, if one does."""
        if updating is not None:
            found = reductions.values(updating.get())
            if self.entropy is not None:
                found.pop("actor/entropy", None)
            self.metrics |= found

    def mini_batched(
        self, batch: RemoteBatch, names: Sequence[str], plan: RolePlan, step: int
    ) -> RemoteBatch:
        """These columns of the batch, split into the role's mini-batches and data ranks."""
        known = self.runtime.fetch(columns(batch, known_of(batch)))
        prompts = known.get("prompt_lengths").numpy() if "prompt_lengths" in known.keys() else None
        cut = cut_mini_batches(
            known.get("lengths").numpy(),
            known.get("group").numpy(),
            plan,
            balance=self.config.trainer.balance_batch,
            prompt_lengths=prompts,
            shuffle_key=(self.config.trainer.seed, step) if plan.shuffle else None,
        )
        return dispatched(columns(batch, [name for name in names if name not in LENGTHS]), cut, plan)

    def restore(self, entropy: dict[str, float]) -> None:
        """Restores the controller of the entropy bonus from a checkpoint; empty: it had none."""
        if self.entropy is not None and entropy:
            self.entropy.load_state_dict(entropy)

    def controllers(self) -> dict[str, dict[str, float]]:
        """State of the controllers for checkpoints, by field of `RunState`."""
        entropy = {} if self.entropy is None else self.entropy.state_dict()
        return {**self.of_advantages, "entropy": entropy}

    def _control_entropy(self, measured: Mapping[str, float]) -> None:
        """Sets the step's entropy coefficient from its entropy; unchanged if no token is trained."""
        if self.entropy is not None and "actor/entropy" in measured:
            entropy = measured["actor/entropy"]
            self.entropy_coeff = self.entropy.take(entropy)
            self.metrics |= {"actor/entropy": entropy, "actor/entropy_coeff": self.entropy_coeff}

    def _compare_with_rollout(self, batch: RemoteBatch) -> RolloutComparison:
        names = ["response_mask", "rollout_log_probs", "old_log_probs", "replica"]
        names += ["entropys"] if "entropys" in batch.columns else []
        return self.roles.advantage.call(AdvantageWorker.compare_with_rollout, columns(batch, names))

    def _disagreement(self, by_replica: Mapping[int, float], limit: float) -> str:
        worst = max(by_replica, key=lambda number: by_replica[number])
        rollout, differing = self.roles.rollout, None
        if rollout is not None and worst < rollout.world_size:
            differing = self.roles.link.first_difference(worst)
        engine = self.config.actor_rollout_ref.rollout.name
        weights = "the trainer's" if GENERATION_ENGINES[engine].reads_back else f"not read back from {engine}"
        usual = "a different chat template or tokenizer, different dtypes"
        cause = f"Its weights are {weights}. Usual causes: {usual}."
        if differing:
            cause = f"The first of its weights that differs from the trainer's: {differing}."
        return (
            f"generation replica {worst} and the trainer disagree: sampled tokens' probabilities differ by"
            f" {by_replica[worst]:.4f} on average, actor_rollout_ref.rollout.probs_diff_limit is {limit}."
            f" {cause}"
        )

    def _throughput(
        self, tokens: int, rows: int, seconds: dict[str, float], before: Traffic
    ) -> dict[str, float]:
        """`perf/throughput` is tokens per second and device of the rollout, as in verl.
        `perf/idle_share/<role>`: share of the step in which the role's busiest process ran no method.

        `perf/dispatch_share`: share of the step in which no worker ran a method: the controller's and Ray's
        own time; 0 where concurrent methods add up to more than the step.
        """
        per_step, now = seconds["timing_s/step"], self.runtime.traffic()
        roles = [role for group in self.runtime.groups for role in group.roles]  # not those of a warm start
        busy = {role: now.worked_since(before, role) / per_step for role in roles}
        perf = {
            "perf/total_num_tokens": float(tokens),
            "perf/time_per_step": per_step,
            "perf/throughput": tokens / per_step / self.plan.rollout_devices,
            "perf/dispatch_share": max(0.0, 1 - sum(busy.values())),
            "perf/controller_bytes_per_trajectory": (now.total - before.total) / rows,
        }
        idle = {f"perf/idle_share/{role}": max(0.0, 1 - share) for role, share in busy.items()}
        return seconds | perf | idle


def teacher_of(source: str, teachers: Collection[str]) -> str | None:
    """The teacher of a data source: the one of its name, else `default`; None: neither exists.

    >>> teacher_of("gsm8k", ["default", "gsm8k"]), teacher_of("gsm8k", ["math"])
    ('gsm8k', None)
    """
    return source if source in teachers else "default" if "default" in teachers else None


def known_of(batch: RemoteBatch) -> list[str]:
    """The columns of this batch that the controller reads to cut mini-batches."""
    return ["group", *(name for name in LENGTHS if name in batch.keys())]


def columns(batch: RemoteBatch, names: Sequence[str]) -> RemoteBatch:
    """Only those columns; row objects and meta_info are dropped."""
    return batch.select(names, [], [])
