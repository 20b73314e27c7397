"""Which worker runs where: turns the configuration into worker groups on resource pools.

In: configuration, plan, runtime. Out: `Roles`, one handle per role. Actor, rollout, critic and reference
share processes, or with `trainer.fuse_roles=false` each has its own; rank 0 of the actor's computes the
advantages between the models' passes. The reward function has a process of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from hydraflow.algorithms.config import BYPASS_LOSSES, Bounds, bounded_rules, is_corrected
from hydraflow.algorithms.correction import Correction, Rejection, Weighting
from hydraflow.batch_plan.layout import Devices, Layout
from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.batch_plan.roles import own_reference
from hydraflow.dispatch.group import Recovery, RoleGroup
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.engine.config import EngineConfig, FSDPConfig, engine_config
from hydraflow.generation.config import GENERATION_ENGINES, RolloutConfig, engine_dtype
from hydraflow.models.config import ModelConfig
from hydraflow.options import Implementation
from hydraflow.schema import PPOConfig
from hydraflow.trainer.machine import SCORE, TRAIN, Machine, training_pool
from hydraflow.trainer.weight_links import (
    Broadcast,
    NoRollout,
    ObjectStore,
    SameProcess,
    WeightLink,
    load_model_directory,
)
from hydraflow.workers.actor import ActorSpec, ActorWorker
from hydraflow.workers.advantage import AdvantageSpec, AdvantageWorker
from hydraflow.workers.config import ActorRolloutRefConfig
from hydraflow.workers.critic import CriticSpec, CriticWorker
from hydraflow.workers.reference import ReferenceSpec, ReferenceWorker
from hydraflow.workers.reward import RewardSpec, RewardWorker
from hydraflow.workers.rollout import RolloutSpec, RolloutWorker
from hydraflow.workers.skipping import SkipLimits


@dataclass(frozen=True)
class _Place:
    """A worker group: a process on each of its devices, with these roles."""

    roles: list[str]
    devices: Devices


@dataclass
class Roles:
    """The worker groups of a run; None where the run has no such role."""

    actor: RoleGroup
    rollout: RoleGroup | None
    reward: RoleGroup
    advantage: RoleGroup
    critic: RoleGroup | None
    ref: RoleGroup | None
    link: WeightLink
    """From the actor to the rollout."""


@dataclass
class SamplingRoles:
    """The worker groups of a run that samples and trains nothing."""

    rollout: RoleGroup
    reward: RoleGroup


def build_roles(config: PPOConfig, plan: BatchPlan, runtime: Runtime, *, skipped: Path) -> Roles:
    """Starts every process of the run and waits until all are ready. `skipped`: the folder for rows of
    skipped optimizer steps."""
    skip_limits = SkipLimits(config.trainer.max_skipped_steps, str(skipped))
    specs = _training_roles(config, plan, skip_limits)
    train: dict[str, RoleGroup] = {}
    # an engine in processes of its own first
    for place in sorted(_places(config, plan), key=lambda place: set(place.roles) != {"rollout"}):
        if roles := {name: spec for name, spec in specs.items() if name in place.roles}:
            group = runtime.group(TRAIN, roles, place.devices.listed())
            train |= {name: group.role(name) for name in roles}
            if _measures_memory(config, roles) and (beside := _beside(plan, roles)):
                group.await_ready()  # nothing else may start meanwhile
                train["rollout"].call(RolloutWorker.sleep, beside)
    score = runtime.group(SCORE, {"reward": _reward_role(config)})
    runtime.await_ready()
    return Roles(
        actor=train["actor"],
        rollout=train.get("rollout"),
        critic=train.get("critic"),
        ref=train.get("ref"),
        reward=score.role("reward"),
        advantage=train["advantage"],
        link=_link(config, plan, train["actor"], train.get("rollout")),
    )


def pool_of(config: PPOConfig, plan: BatchPlan, machine: Machine) -> ResourcePool:
    """The devices of the plan's cluster, for all worker groups."""
    places = _places(config, plan)
    on_nodes = [pool.devices_per_node for pool in plan.cluster.pools for _ in range(pool.nodes)]
    users = Counter(device for place in places for device in place.devices.listed())
    return training_pool(machine, devices=on_nodes, groups=max(users.values()))


def _places(config: PPOConfig, plan: BatchPlan) -> list[_Place]:
    """The worker groups: one for each set of devices, or with `trainer.fuse_roles=false` for each role. A
    generation engine that shares no process has its own, and so have Megatron's roles of other sizes than
    those before them: its groups of ranks are a process's."""
    fused = config.trainer.fuse_roles or config.trainer.debug.local
    alone = {"rollout"} if GENERATION_ENGINES[config.actor_rollout_ref.rollout.name].own_process else set()
    places: dict[tuple[Devices, str], _Place] = {}
    sizes: dict[Devices, tuple[int, ...]] = {}
    for role, layout in plan.layouts.items():
        stages, experts = (layout.pipeline, layout.virtual_pipeline), (layout.expert, layout.expert_tensor)
        mine = (layout.tensor, layout.context, *stages, *experts)
        if layout.engine == "megatron" and sizes.setdefault(layout.devices, mine) != mine:
            alone.add(role)
        key = layout.devices, "" if fused and role not in alone else role
        places.setdefault(key, _Place([], layout.devices)).roles.append(role)
    actor = next(place for place in places.values() if "actor" in place.roles)
    actor.roles.append("advantage")
    return list(places.values())


def _link(config: PPOConfig, plan: BatchPlan, actor: RoleGroup, rollout: RoleGroup | None) -> WeightLink:
    if rollout is None:
        return NoRollout()
    if rollout.group is actor.group:
        return SameProcess(rollout)
    own = rollout.group.roles
    tensor = plan.layouts["rollout"].tensor
    kind = ObjectStore if _on_one_node(actor, rollout) else Broadcast
    link = kind(actor, rollout, _rollout(config), _beside(plan, own), tensor)
    # a model that is trained cannot be made again, nor can one process of an engine on several devices
    if len(own) == 1 and tensor == 1:
        rollout.group.recovery = Recovery(link.restore, link.config.max_retries)
    return link


def _on_one_node(actor: RoleGroup, rollout: RoleGroup) -> bool:
    """Whether all generation processes are on the node of the process that sends them weights."""
    sender = actor.group.processes[0].node_id
    return all(process.node_id == sender for process in rollout.group.processes.values())


def _measures_memory(config: PPOConfig, roles: Collection[str]) -> bool:
    """Whether this group's engine takes, when it starts, a share of the memory that it finds free."""
    return "rollout" in roles and GENERATION_ENGINES[config.actor_rollout_ref.rollout.name].own_process


def _beside(plan: BatchPlan, own: Collection[str]) -> list[str]:
    """Roles that are not among the rollout's `own`, on devices of the rollout."""
    devices = plan.layouts["rollout"].devices
    return [role for role, layout in plan.layouts.items() if role not in own and layout.devices & devices]


def build_sampling_roles(config: PPOConfig, plan: BatchPlan, runtime: Runtime) -> SamplingRoles:
    """Starts what `trainer.debug.rollout_only` needs; the generation engine has the weights of
    `model.path`."""
    devices = plan.layouts["rollout"].devices.listed()
    train = runtime.group(TRAIN, {"rollout": _rollout_role(config, plan)}, devices)
    score = runtime.group(SCORE, {"reward": _reward_role(config)})
    runtime.await_ready()
    roles = SamplingRoles(train.role("rollout"), score.role("reward"))
    alone = plan.layouts["rollout"].tensor == 1  # else one process of an engine cannot be made again
    load_model_directory(roles.rollout, config.actor_rollout_ref.rollout.max_retries if alone else 0)
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
        correction=rollout_correction(config),
        loss=_loss_instead(config),
    )
    roles = {"actor": RoleSpec(ActorWorker, (actor,))}
    if not config.trainer.debug.train_only:
        roles["rollout"] = _rollout_role(config, plan)
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
        engine = reference_engine(policy, plan.layouts["ref"])
        ref = ReferenceSpec(policy.actor.strategy, policy.model, engine, plan.ref, temperature)
        roles["ref"] = RoleSpec(ReferenceWorker, (ref,))
    advantage = AdvantageSpec(config.algorithm, tokens, drop_failed=config.reward.on_failure == "mask")
    roles["advantage"] = RoleSpec(AdvantageWorker, (advantage,))
    return roles


def rollout_correction(config: PPOConfig) -> Correction | None:
    """The correction of the policy loss, if there is one."""
    asked, weighting = config.algorithm.rollout_correction, None
    if not is_corrected(asked):
        return None
    if asked.rollout_is and not (asked.bypass_mode and asked.loss_type == "ppo_clip"):
        limits = Bounds.read(asked.rollout_is_threshold)
        assert limits is not None, "its rule holds"
        normalized = asked.rollout_is_batch_normalize
        weighting = Weighting(asked.rollout_is, limits.upper, limits.lower, normalized)
    return Correction(
        weighting,
        tuple(rejection(rule, bounds) for rule, bounds in bounded_rules(asked)),
        of_current_policy=asked.bypass_mode,
    )


def rejection(rule: str, bounds: Bounds) -> Rejection:
    """A rejection rule with its threshold; the lower bound of a ratio is by default the reciprocal."""
    lower = bounds.lower
    if lower is None:
        lower = 1 / bounds.upper if rule.endswith("_k1") else 0.0
    return Rejection(rule, bounds.upper, lower)


def _loss_instead(config: PPOConfig) -> Implementation | None:
    """The policy loss in place of `actor.policy_loss.loss_mode`, if there is one."""
    asked = config.algorithm.rollout_correction
    return (
        BYPASS_LOSSES[asked.loss_type] if asked.bypass_mode and BYPASS_LOSSES[asked.loss_type].where else None
    )


def critic_model(config: PPOConfig) -> ModelConfig:
    """The critic starts from its own model, or from the actor's."""
    critic = config.critic.model
    return critic if critic.path else replace(critic, path=config.actor_rollout_ref.model.path)


def _rollout(config: PPOConfig) -> RolloutConfig:
    """The section, with the dtype that it has."""
    policy = config.actor_rollout_ref
    trainer = engine_config(policy.actor.strategy, policy.actor)
    dtype = engine_dtype(policy.rollout.dtype, trainer.compute_dtype)
    return replace(policy.rollout, dtype=dtype)


def _rollout_role(config: PPOConfig, plan: BatchPlan) -> RoleSpec:
    spec = RolloutSpec(
        config.actor_rollout_ref.model,
        _rollout(config),
        max_prompt=config.data.max_prompt_length,
        max_tokens=config.data.max_response_length,
        seed=config.trainer.seed,
        tensor_parallel=plan.layouts["rollout"].tensor,
        start_seconds=config.trainer.start_timeout,
    )
    return RoleSpec(RolloutWorker, (spec,))


def reference_engine(policy: ActorRolloutRefConfig, layout: Layout) -> EngineConfig:
    """The reference's engine; its sizes are the actor's, where nothing else is said."""
    engine = engine_config(policy.actor.strategy, policy.ref)
    if isinstance(engine, FSDPConfig):
        return replace(engine, ulysses_sequence_parallel_size=layout.context)
    return replace(
        engine,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )


def _reward_role(config: PPOConfig) -> RoleSpec:
    return RoleSpec(RewardWorker, (RewardSpec(config.actor_rollout_ref.model, config.reward),))
