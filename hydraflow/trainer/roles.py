"""Which worker runs where: turns the configuration into worker groups on resource pools.

In: configuration, plan, runtime. Out: `Roles`, one handle per role. Actor, rollout, critic and reference
share processes, and rank 0 of them computes the advantages between the models' passes; the reward function
has a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.batch_plan.roles import own_reference
from hydraflow.dispatch.group import RoleGroup
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.models.config import ModelConfig
from hydraflow.schema import PPOConfig
from hydraflow.trainer.machine import SCORE, TRAIN
from hydraflow.workers.actor import ActorSpec, ActorWorker
from hydraflow.workers.advantage import AdvantageSpec, AdvantageWorker
from hydraflow.workers.critic import CriticSpec, CriticWorker
from hydraflow.workers.reference import ReferenceSpec, ReferenceWorker
from hydraflow.workers.reward import RewardSpec, RewardWorker
from hydraflow.workers.rollout import RolloutSpec, RolloutWorker
from hydraflow.workers.skipping import SkipLimits


@dataclass
class Roles:
    """The worker groups of a run; None where the run has no such role."""

    actor: RoleGroup
    rollout: RoleGroup | None
    reward: RoleGroup
    advantage: RoleGroup
    critic: RoleGroup | None
    ref: RoleGroup | None


@dataclass
class SamplingRoles:
    """The worker groups of a run that samples and trains nothing."""

    rollout: RoleGroup
    reward: RoleGroup


def build_roles(config: PPOConfig, plan: BatchPlan, runtime: Runtime, *, skipped: Path) -> Roles:
    """Starts every process of the run and waits until all are ready. `skipped`: the folder for rows of
    skipped optimizer steps."""
    skip_limits = SkipLimits(config.trainer.max_skipped_steps, str(skipped))
    train = runtime.group(TRAIN, _training_roles(config, plan, skip_limits))
    score = runtime.group(SCORE, {"reward": _reward_role(config)})
    runtime.await_ready()
    return Roles(
        actor=train.role("actor"),
        rollout=train.role("rollout") if "rollout" in train.roles else None,
        critic=train.role("critic") if plan.critic else None,
        ref=train.role("ref") if own_reference(config) else None,
        reward=score.role("reward"),
        advantage=train.role("advantage"),
    )


def build_sampling_roles(config: PPOConfig, runtime: Runtime) -> SamplingRoles:
    """Starts what `trainer.debug.rollout_only` needs; the generation engine has the weights of
    `model.path`."""
    train = runtime.group(TRAIN, {"rollout": _rollout_role(config)})
    score = runtime.group(SCORE, {"reward": _reward_role(config)})
    runtime.await_ready()
    roles = SamplingRoles(train.role("rollout"), score.role("reward"))
    roles.rollout.call(RolloutWorker.load_weights)
    return roles


def _training_roles(config: PPOConfig, plan: BatchPlan, skip_limits: SkipLimits) -> dict[str, RoleSpec]:
    policy = config.actor_rollout_ref
    temperature = policy.rollout.temperature
    tokens = config.data.max_response_length
    actor = ActorSpec(
        model=policy.model,
        actor=policy.actor,
        plan=plan.actor,
        log_prob=plan.old_log_prob,
        ref=plan.ref,
        temperature=temperature,
        response_tokens=tokens,
        total_steps=plan.total_steps,
        seed=config.trainer.seed,
        skip_limits=skip_limits,
    )
    roles = {"actor": RoleSpec(ActorWorker, (actor,))}
    if not config.trainer.debug.train_only:
        roles["rollout"] = _rollout_role(config)
    if plan.critic:
        critic = replace(config.critic, model=critic_model(config))
        assert plan.values is not None, "a critic has a pass that computes values"
        spec = CriticSpec(
            critic,
            plan.critic,
            plan.values,
            response_tokens=tokens,
            total_steps=plan.total_steps,
            seed=config.trainer.seed,
            skip_limits=skip_limits,
        )
        roles["critic"] = RoleSpec(CriticWorker, (spec,))
    if own_reference(config):
        assert plan.ref is not None, "a reference has a pass that computes log-probabilities"
        ref = ReferenceSpec(
            policy.actor.strategy, policy.model, policy.ref.fsdp_config, plan.ref, temperature
        )
        roles["ref"] = RoleSpec(ReferenceWorker, (ref,))
    advantage = AdvantageSpec(config.algorithm, tokens, drop_failed=config.reward.on_failure == "mask")
    roles["advantage"] = RoleSpec(AdvantageWorker, (advantage,))
    return roles


def critic_model(config: PPOConfig) -> ModelConfig:
    """The critic starts from its own model, or from the actor's."""
    critic = config.critic.model
    return critic if critic.path else replace(critic, path=config.actor_rollout_ref.model.path)


def _rollout_role(config: PPOConfig) -> RoleSpec:
    policy = config.actor_rollout_ref
    spec = RolloutSpec(
        policy.model, policy.rollout, max_tokens=config.data.max_response_length, seed=config.trainer.seed
    )
    return RoleSpec(RolloutWorker, (spec,))


def _reward_role(config: PPOConfig) -> RoleSpec:
    return RoleSpec(RewardWorker, (RewardSpec(config.actor_rollout_ref.model, config.reward),))
