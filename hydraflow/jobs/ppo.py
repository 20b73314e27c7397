"""Reinforcement learning from configuration to run folder: check, make ready, plan, start workers, train, save.

Whatever can be wrong with configuration, data, paths and resources is found before a worker starts; with a recipe, the plan is
made before the recipe's model is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from hydraflow.batch_plan import BatchPlan, resolve_plan
from hydraflow.batch_plan_table import print_plan
from hydraflow.data.loader import PromptLoader
from hydraflow.data.prompts import PromptDataset
from hydraflow.jobs.context import require_context
from hydraflow.jobs.session import Session
from hydraflow.models.loading import load_config, load_tokenizer, require_weights
from hydraflow.protocol.batch import DataProto
from hydraflow.recipes import arithmetic
from hydraflow.rewards.custom import check_reward
from hydraflow.schema import PPOConfig
from hydraflow.trainer.loop import Loop
from hydraflow.trainer.ppo import PPOTrainer
from hydraflow.trainer.roles import Roles, build_roles, critic_model, needs_critic, needs_reference
from hydraflow.trainer.validation import Validator
from hydraflow.workers.actor import ActorWorker
from hydraflow.workers.critic import CriticWorker


@dataclass(frozen=True)
class Prompts:
    """What a run reads; None: it needs none."""

    train: PromptDataset | None
    val: PromptDataset | None


class PPOJob:
    """One `main_ppo` run; `given` names the keys of the command line, for the plan's provenance."""

    def __init__(self, config: PPOConfig, *, given: Collection[str] = ()):
        self.config, self.given = config, given

    def run(self) -> None:
        """Trains; raises ConfigError before anything starts, other errors of `errors.py` later."""
        check_reward(self.config.reward)
        with Session(self.config.trainer, self.config.ray_init, scoring=True) as session:
            if self.config.recipe.name != "none":
                self._plan(session, self.config.recipe.train_problems)
                self._make_recipe(session)
            prompts = self._read()
            plan = self._plan(session, len(prompts.train) if prompts.train else None)
            print_plan(plan)
            session.keep(self.config, plan)
            self._train(session, plan, prompts)

    def _make_recipe(self, session: Session) -> None:
        """Points the configuration to the recipe's files and model, which are made if they are not there yet."""
        assets = arithmetic.prepare(
            self.config.recipe,
            self.config.trainer.seed,
            session.machine,
            session.clock,
            runtime=lambda: session.runtime,
            scratch=session.folder.path / "warm_start",
            logger=self.config.trainer.logger,
        )
        policy = self.config.actor_rollout_ref
        self.config = replace(
            self.config,
            data=replace(self.config.data, train_files=str(assets.train), val_files=str(assets.val)),
            actor_rollout_ref=replace(policy, model=replace(policy.model, path=str(assets.model))),
        )

    def _read(self) -> Prompts:
        """Opens every file that the run will use. Raises ConfigError for what is missing or does not fit."""
        data, model = self.config.data, self.config.actor_rollout_ref.model
        config = load_config(model)
        require_weights(model, field="actor_rollout_ref.model")
        if needs_critic(self.config):
            critic = critic_model(self.config)
            load_config(critic, field="critic.model")
            require_weights(critic, field="critic.model")
        tokenizer = load_tokenizer(model)
        train = val = None
        if not self.config.trainer.val_only:
            train = PromptDataset(data, data.train_files, tokenizer, max_samples=data.train_max_samples)
        if data.val_files:
            val = PromptDataset(data, data.val_files, tokenizer, key="data.val_files", max_samples=data.val_max_samples)
        datasets = [dataset for dataset in (train, val) if dataset is not None]
        check_reward(self.config.reward, sorted({source for dataset in datasets for source in dataset.data_sources()}))
        for dataset in datasets:
            require_context(dataset, data.max_response_length, config)
        return Prompts(train, val)

    def _plan(self, session: Session, prompts: int | None) -> BatchPlan:
        return resolve_plan(
            self.config,
            processes=session.machine.processes,
            prompts=prompts,
            critic=needs_critic(self.config),
            reference=needs_reference(self.config),
            given=self.given,
        )

    def _train(self, session: Session, plan: BatchPlan, prompts: Prompts) -> None:
        config, runtime = self.config, session.runtime
        roles = build_roles(config, plan, runtime)
        trainer = PPOTrainer(config, plan, roles, runtime)
        validator = Validator(config, plan, roles, runtime, val_batches(prompts.val, plan)) if prompts.val else None
        trackers = session.open_trackers(plan.total_steps)
        loop = Loop(config.trainer, trainer, validator, trackers, session.folder, session.clock)
        if prompts.train is None:
            session.why = loop.validate_only()
            return
        loader = PromptLoader(prompts.train, plan.prompts_per_step, shuffle=config.data.shuffle, seed=config.trainer.seed)
        session.why = loop.fit(loader.next_batch, plan.total_steps)
        if config.trainer.save_final_model:
            save(roles, session)


def save(roles: Roles, session: Session) -> None:
    """Writes what was trained as Hugging Face directories."""
    roles.actor.call(ActorWorker.save_hf, str(session.folder.final_model / "actor"))
    if roles.critic is not None:
        roles.critic.call(CriticWorker.save_hf, str(session.folder.final_model / "critic"))


def val_batches(val: PromptDataset, plan: BatchPlan) -> list[DataProto]:
    """The held-out prompts in calls of `data.val_batch_size`."""
    size = plan.validation.prompts_per_call or len(val)
    return [val.batch(range(start, min(start + size, len(val)))) for start in range(0, len(val), size)]
