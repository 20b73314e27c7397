"""Reinforcement learning from configuration to run folder: check, prepare, plan, start workers, train, save.

Errors in configuration, data, paths and resources are found before a worker starts; with a recipe, before its
warm start, by checking an untrained model of the same kind. Then the recipe's files and model replace those
of the configuration, and the rest is the same for all runs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from hydraflow.algorithms.config import estimator_of
from hydraflow.batch_plan.resolve import BatchPlan, resolve_plan
from hydraflow.batch_plan.table import print_plan
from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.preflight import require_healthy
from hydraflow.compose.command import Command
from hydraflow.compose.debugging import applied
from hydraflow.compose.own_functions import own_files, with_whole_paths
from hydraflow.data.loader import PromptLoader
from hydraflow.data.prompts import PromptDataset
from hydraflow.dispatch.runtime import Runtime
from hydraflow.jobs.inputs import (
    RunPrompts,
    open_inputs,
    require_rounded_roles,
    require_shareable_rows,
    require_teachers,
)
from hydraflow.jobs.own_code import check_functions
from hydraflow.jobs.restarts import Restarts, with_restarts
from hydraflow.jobs.saving import (
    RunCheckpointing,
    ppo_roles,
    require_metric,
    training_loader,
    validated_roles,
)
from hydraflow.jobs.session import Session
from hydraflow.recipes import arithmetic
from hydraflow.rewards.functions import unknown_sources
from hydraflow.rewards.pool import check_function
from hydraflow.rewards.selection import check_sources
from hydraflow.schema import PPOConfig
from hydraflow.system.paths import expanded
from hydraflow.tracking.endings import DONE
from hydraflow.tracking.trackers import Trackers
from hydraflow.trainer.config import ClusterConfig
from hydraflow.trainer.generations import GenerationDump
from hydraflow.trainer.identity import Identity, identity_of
from hydraflow.trainer.loop import Loop
from hydraflow.trainer.ppo import PPOTrainer
from hydraflow.trainer.recorded import RecordedSource, ReplayedSource, require_dumps
from hydraflow.trainer.resume import CheckpointRequirements, load_roles
from hydraflow.trainer.roles import (
    Roles,
    SamplingRoles,
    build_roles,
    build_sampling_roles,
    most_failed_share,
    pool_of,
    rewards_are_optional,
)
from hydraflow.trainer.rollout_only import RolloutTrainer
from hydraflow.trainer.source import Lockstep, Sampler, TrajectorySource
from hydraflow.trainer.validation import Validator, metric_names
from hydraflow.workers.engine_worker import EngineWorker
from hydraflow.workers.reward_model import RewardModelWorker
from hydraflow.workers.rollout import SamplingSpec

VALIDATION = -1
"""Replaces the epoch in the random keys of a validation."""


def run_ppo(config: PPOConfig, *, command: Command | None = None) -> None:
    """`PPOJob.run`, repeated after worker failures as often as `trainer.max_restarts` allows."""
    with_restarts(config, lambda given, restarts: PPOJob(given, command=command, restarts=restarts).run())


class PPOJob:
    """One `main_ppo` run. `command`: origins of the values, for the plan and the run folder."""

    def __init__(
        self, config: PPOConfig, *, command: Command | None = None, restarts: Restarts | None = None
    ):
        self.config, self.requested, self.restarts = with_whole_paths(applied(config)), config, restarts
        self.command = command or Command("ppo")

    def run(self) -> None:
        """Trains, or resumes training. Raises ConfigError before anything starts, other errors of `errors.py`
        later."""
        with Session(self.config, scoring=True, restarts=self.restarts) as session:
            with arithmetic.rehearsed(self.config) as (config, final):
                plan, prompts = self._checked(session, config, final)
            print_plan(plan)
            loader = self._loader(plan, prompts) if final else None
            if not session.begin(self._required(plan, loader)):
                return
            require_dumps(self.config.trainer.debug, plan, first=session.start.step + 1)
            if self.config.recipe.name != "none" and not self._make_recipe(session):
                return
            if not final:
                plan, prompts = self._checked(session, self.config, True)
                loader = self._loader(plan, prompts)
                if loader is not None and session.start.found is not None:
                    loader.require_same(session.start.found.state.data)
            session.keep(self.requested, plan, self.command, own_files(self.requested))
            self._train(session, plan, prompts, loader)

    def _checked(self, session: Session, config: PPOConfig, final: bool) -> tuple[BatchPlan, RunPrompts]:
        """Opens every file that the run will use, and makes the plan. Raises one ConfigError that lists
        everything missing or inconsistent. Unless `final`, the files are a small sample of the recipe's."""
        faults = session.faults
        prompts = open_inputs(config, faults)
        sources = set(prompts.data_sources()) if prompts else set()
        if rewards_are_optional(config):
            sources -= {str(problem.value) for problem in unknown_sources(sources)}
        faults.passes(lambda: check_sources(config.reward, sources))
        count = len(prompts.train) if prompts and prompts.train else None
        if not final:
            count = config.recipe.train_problems
        plan = self._plan(session, count)
        if plan and not session.has_started:
            pool = faults.result(lambda: pool_of(config, plan, session.machine))
            if pool is not None:
                session.place(pool)
        if plan and prompts:
            measured = metric_names(prompts.val.data_sources() if prompts.val else (), plan)
            faults.passes(lambda: require_metric(config.trainer.keep_best, measured))
            require_shareable_rows(config, plan, faults)
            require_rounded_roles(config, faults)
            faults.passes(lambda: require_teachers(config, plan, prompts))
        if not session.has_started:
            faults.passes(lambda: check_function(config.reward))
            faults.passes(lambda: check_functions(config))
            self._check_up(session, plan, prompts)
        faults.require_none()
        assert plan is not None and prompts is not None, "whatever could not be opened is a fault"
        return plan, prompts

    def _loader(self, plan: BatchPlan, prompts: RunPrompts) -> PromptLoader | None:
        """The loader of the training prompts; None: the run only validates."""
        if not prompts.train:
            return None
        return training_loader(self.config, prompts.train, plan.prompts_per_step)

    def _required(self, plan: BatchPlan, loader: PromptLoader | None) -> CheckpointRequirements:
        """What the run requires of a checkpoint; one that only validates accepts any configuration. loader:
        None when it does not train, or the recipe has no files yet."""
        if self.config.trainer.val_only:
            return CheckpointRequirements(Identity({}), validated_roles(), 0, looks_only="trainer.val_only")
        if self.config.trainer.debug.rollout_only:
            key = "trainer.debug.rollout_only"
            return CheckpointRequirements(Identity({}), {}, plan.total_steps, looks_only=key)
        roles = ppo_roles(self.config, critic=plan.critic is not None)
        return CheckpointRequirements(identity_of(self.requested, plan), roles, plan.total_steps, loader)

    def _make_recipe(self, session: Session) -> bool:
        """Points the configuration at the recipe's files and model, which are made if they do not exist.
        False: a signal asked the run to end meanwhile."""
        trainer = self.config.trainer
        debugged = self.config.debug or trainer.debug.local  # a debugger uses the terminal
        assets = arithmetic.prepare(
            self.config.recipe,
            trainer.seed,
            session.machine,
            session.clock,
            runtime=lambda: session.runtime,
            scratch=session.folder.path / "warm_start",
            logger=[name for name in trainer.logger if not (debugged and name == "console")],
        )
        self.config = arithmetic.pointed_at(self.config, assets)
        if session.clock.preempted:
            session.why = session.clock.why_to_stop()
        return not session.clock.preempted

    def _plan(self, session: Session, prompts: int | None) -> BatchPlan | None:
        """The plan; None if it, or the machine it is for, has a fault."""
        machine = session.found_machine
        if machine is None:
            return None
        # `cluster` is for planning other machines than this run's
        per_node, here = machine.processes_per_node, replace(self.config, cluster=ClusterConfig())
        return session.faults.result(
            lambda: resolve_plan(
                here, prompts=prompts, devices_per_node=per_node, origins=self.command.origins
            )
        )

    def _check_up(self, session: Session, plan: BatchPlan | None, prompts: RunPrompts | None) -> None:
        """Checks this machine for what the run needs, except inputs that are already open."""
        opened: dict[str, Any] = {"machine": session.found_machine, "plan": plan}
        if self.config.recipe.name == "none":
            opened["tokenizer"] = prompts and prompts.tokenizer
            opened["first_rows"] = prompts and prompts.first_rows()
        session.faults.passes(
            lambda: require_healthy(CheckContext(self.config, opened=opened), known=session.faults.problems)
        )

    def _train(
        self, session: Session, plan: BatchPlan, prompts: RunPrompts, loader: PromptLoader | None
    ) -> None:
        if self.config.trainer.debug.rollout_only and loader is not None:
            self._sample(session, plan, prompts, loader)
            return
        roles = build_roles(self.config, plan, session.runtime, skipped=session.folder.skipped)
        if loader is None:
            self._validate_only(session, plan, roles, prompts)
            return
        source = self.source(plan, session.runtime, roles, loader)
        groups = {"actor": roles.actor}
        if roles.critic is not None:
            groups["critic"] = roles.critic
        saving = RunCheckpointing(
            self.config.trainer,
            self._required(plan, loader),
            session.start,
            groups,
            source,
            loader,
            roles.advantage,
            undisturbed=roles.turns.undisturbed,
        )
        saving.restore()
        trackers = session.open_trackers(plan.total_steps)
        trainer = PPOTrainer(self.config, plan, roles, session.runtime, source, self._dump())
        if session.start.found is not None:
            trainer.restore(session.start.found.state.entropy)
        loop = self._loop(session, plan, roles, trainer, prompts, trackers)
        with saving.checkpointer(trackers, trainer.controllers) as checkpoints:
            session.why = loop.fit(
                checkpoints,
                plan.total_steps,
                done=session.start.step,
                validate_first=session.validates_first(
                    plan.total_steps,
                    self.config.trainer,
                    before_training=self.config.trainer.val_before_train,
                ),
            )
        if self.config.trainer.save_final_model and (session.why == DONE or not session.clock.preempted):
            for name, group in groups.items():
                group.call(EngineWorker.save_hf, str(session.folder.final_model / name))

    def _sample(self, session: Session, plan: BatchPlan, prompts: RunPrompts, loader: PromptLoader) -> None:
        """Samples and scores every step's prompts; nothing is trained or saved."""
        roles = build_sampling_roles(self.config, plan, session.runtime)
        source = self.source(plan, session.runtime, roles, loader)
        most = most_failed_share(self.config)
        trainer = RolloutTrainer(plan, session.runtime, source, self._dump(), most)
        loop = self._loop(session, plan, roles, trainer, prompts, session.open_trackers(plan.total_steps))
        session.why = loop.fit(None, plan.total_steps, validate_first=self.config.trainer.val_before_train)

    def source(
        self, plan: BatchPlan, runtime: Runtime, roles: Roles | SamplingRoles, loader: PromptLoader
    ) -> TrajectorySource:
        """The source of trajectories: the generation engine or files, recorded to files or not. Subclasses
        may return another."""
        debug, rollout = self.config.trainer.debug, self.config.actor_rollout_ref.rollout
        source: TrajectorySource
        if debug.load_rollouts is not None:
            source = ReplayedSource(expanded(debug.load_rollouts), loader)
        else:
            routes = self.config.actor_rollout_ref.actor.router_replay.by_rollout
            how = SamplingSpec.of_training(rollout, plan.samples_per_prompt, routes=routes)
            algorithm = self.config.algorithm
            estimator = estimator_of(algorithm.adv_estimator)
            sampler = _sampler(
                roles,
                how,
                with_texts=self._dump() is not None,
                with_greedy=estimator.greedy_baseline,
                parts=algorithm.gdpo_reward_keys or () if estimator.several_rewards else (),
            )
            source = Lockstep(loader, sampler)
        if debug.save_rollouts is None:
            return source
        return RecordedSource(source, expanded(debug.save_rollouts), runtime)

    def _dump(self) -> GenerationDump | None:
        """Writes training responses as text. None: not asked for, or replayed from files."""
        trainer = self.config.trainer
        if trainer.debug.load_rollouts:
            return None
        return GenerationDump.to(trainer.rollout_data_dir, "trainer.rollout_data_dir")

    def _validate_only(self, session: Session, plan: BatchPlan, roles: Roles, prompts: RunPrompts) -> None:
        """Validates the configured model or checkpoint once."""
        start = session.start
        if start.found is not None:
            load_roles(start.found, {"actor": roles.actor}, self._required(plan, None).roles)
        assert prompts.val is not None, "a run without training prompts validates"
        held_out, _ = self._held_out(plan, roles, prompts.val)
        trainer = PPOTrainer(self.config, plan, roles, session.runtime, held_out, None)
        loop = self._loop(session, plan, roles, trainer, prompts, session.open_trackers(plan.total_steps))
        session.why = loop.validate_only(start.step)

    def _loop(
        self,
        session: Session,
        plan: BatchPlan,
        roles: Roles | SamplingRoles,
        trainer: PPOTrainer | RolloutTrainer,
        prompts: RunPrompts,
        trackers: Trackers,
    ) -> Loop:
        """The loop around a trainer, with a validator if there are held-out prompts."""
        validator = None
        if prompts.val is not None and not self.config.trainer.debug.train_only:
            source, calls = self._held_out(plan, roles, prompts.val)
            validator = Validator(self.config, plan, source, calls, session.runtime, session.folder, trackers)
        restarts = session.restarts.done
        return Loop(self.config.trainer, trainer, validator, trackers, session.clock, restarts=restarts)

    def _held_out(
        self, plan: BatchPlan, roles: Roles | SamplingRoles, prompts: PromptDataset
    ) -> tuple[TrajectorySource, int]:
        """The source of a validation's trajectories, and the number of `take` calls that covers them."""
        rollout = self.config.actor_rollout_ref.rollout
        how = SamplingSpec.of_validation(rollout, plan.validation.samples_per_prompt)
        per_call = plan.validation.prompts_per_call or len(prompts)
        loader = PromptLoader(prompts, per_call, shuffle=False, seed=0, drop_last=False)
        sampler = _sampler(roles, how, with_texts=True)
        return Lockstep(loader, sampler, visit=VALIDATION), len(loader)


def _sampler(roles: Roles | SamplingRoles, how: SamplingSpec, **more: Any) -> Sampler:
    assert roles.rollout is not None, "a run that samples has a generation engine"
    model = None
    if roles.reward_model is not None:
        model = partial(roles.reward_model.call, RewardModelWorker.compute_scores)
    return Sampler(roles.rollout, roles.reward, how, turns=roles.turns, model=model, **more)
