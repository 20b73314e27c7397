"""Reinforcement learning from configuration to run folder: check, make ready, plan, start workers, train, save.

Whatever can be wrong with configuration, data, paths and resources is found before a worker starts.
"""

from __future__ import annotations

from dataclasses import replace

from hydraflow.batch_plan import BatchPlan, resolve_plan
from hydraflow.batch_plan_table import print_plan
from hydraflow.data.loader import PromptLoader
from hydraflow.data.prompts import PromptDataset
from hydraflow.jobs.session import Session
from hydraflow.models.loading import load_config, load_tokenizer
from hydraflow.recipes import arithmetic
from hydraflow.rewards.custom import check_reward
from hydraflow.schema import PPOConfig
from hydraflow.tracking.trackers import open_trackers
from hydraflow.trainer.loop import Loop
from hydraflow.trainer.ppo import PPOTrainer
from hydraflow.trainer.roles import build_roles, needs_critic, needs_reference
from hydraflow.trainer.validation import Validator
from hydraflow.workers.actor import ActorWorker
from hydraflow.workers.critic import CriticWorker


class PPOJob:
    """One `main_ppo` run."""

    def __init__(self, config: PPOConfig):
        self.config = config

    def run(self) -> None:
        """Trains; raises ConfigError before anything starts, other errors of `errors.py` later."""
        check_reward(self.config.reward)
        with Session(self.config.trainer, self.config.ray_init, scoring=True) as session:
            self._make_recipe(session)
            self._train(session)

    def _make_recipe(self, session: Session) -> None:
        if self.config.recipe.name == "none":
            return
        folder = session.folder.path / "warm_start"
        assets = arithmetic.prepare(
            self.config.recipe,
            self.config.trainer.seed,
            session.machine,
            runtime=lambda: session.runtime,
            trackers=lambda: open_trackers(self.config.trainer.logger, folder, title="warm start", total_steps=None),
        )
        policy = self.config.actor_rollout_ref
        self.config = replace(
            self.config,
            data=replace(self.config.data, train_files=str(assets.train), val_files=str(assets.val)),
            actor_rollout_ref=replace(policy, model=replace(policy.model, path=str(assets.model))),
        )

    def _train(self, session: Session) -> None:
        config = self.config
        load_config(config.actor_rollout_ref.model)
        tokenizer = load_tokenizer(config.actor_rollout_ref.model)
        train = PromptDataset(config.data, config.data.train_files, tokenizer, max_samples=config.data.train_max_samples)
        sources = train.data_sources()
        val = None
        if config.data.val_files:
            val = PromptDataset(
                config.data, config.data.val_files, tokenizer, key="data.val_files", max_samples=config.data.val_max_samples
            )
            sources += val.data_sources()
        check_reward(config.reward, sources)
        plan = self._plan(session, len(train))
        loader = PromptLoader(train, plan.prompts_per_step, shuffle=config.data.shuffle, seed=config.trainer.seed)
        session.write_config(config)
        roles = build_roles(config, plan, session.runtime)
        trainer = PPOTrainer(config, plan, roles, session.runtime)
        validator = Validator(config, plan, roles, session.runtime, val_batches(val, plan)) if val else None
        trackers = session.open_trackers(plan.total_steps)
        loop = Loop(config.trainer, trainer, validator, trackers, session.folder, session.clock)
        session.why = loop.fit(loader.next_batch, plan.total_steps)
        if config.trainer.save_final_model and not config.trainer.val_only:
            roles.actor.call(ActorWorker.save_hf, str(session.folder.final_model / "actor"))
            if roles.critic is not None:
                roles.critic.call(CriticWorker.save_hf, str(session.folder.final_model / "critic"))

    def _plan(self, session: Session, prompts: int) -> BatchPlan:
        plan = resolve_plan(
            self.config,
            processes=session.machine.processes,
            prompts=prompts,
            critic=needs_critic(self.config),
            reference=needs_reference(self.config),
        )
        print_plan(plan)
        session.folder.plan.write_text(plan.to_json())
        return plan


def val_batches(val: PromptDataset, plan: BatchPlan) -> list:
    """The held-out prompts in calls of `data.val_batch_size`."""
    size = plan.validation.prompts_per_call or len(val)
    return [val.batch(range(start, min(start + size, len(val)))) for start in range(0, len(val), size)]
