"""Which worker runs where: turns the configuration into worker groups on resource pools.

In: configuration, plan, runtime. Out: `Roles`, one handle per role. Actor, rollout, critic and reference
share processes, or with `trainer.fuse_roles=false` each has its own; rank 0 of the actor's computes the
advantages between the models' passes. The reward function has its own process.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from hydraflow.algorithms.config import Bounds, bounded_rules, estimator_of, is_corrected
from hydraflow.algorithms.correction import Correction, Rejection, Weighting
from hydraflow.algorithms.distillation.terms import Distillation
from hydraflow.algorithms.shaping import OverlongBuffer
from hydraflow.batch_plan.layout import Devices, Layout
from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.batch_plan.roles import own_reference, policy_loss
from hydraflow.dispatch.group import Recovery, RoleGroup
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.engine.config import EngineConfig, FSDPConfig, engine_config
from hydraflow.generation.config import GENERATION_ENGINES, RolloutConfig, engine_dtype
from hydraflow.models.adapters import AdapterLayers
from hydraflow.models.config import ModelConfig
from hydraflow.schema import PPOConfig
from hydraflow.trainer.machine import SCORE, TRAIN, Machine, training_pool
from hydraflow.trainer.turns import EngineRole, Turns
from hydraflow.trainer.weight_links import (
    Broadcast,
    NoRollout,
    SameProcess,
    SeparateProcesses,
    SharedMemory,
    WeightLink,
    load_model_directory,
)
from hydraflow.workers.actor import ActorSpec, ActorWorker
from hydraflow.workers.advantage import AdvantageSpec, AdvantageWorker
from hydraflow.workers.config import ActorRolloutRefConfig
from hydraflow.workers.critic import CriticSpec, CriticWorker
from hydraflow.workers.reference import ReferenceSpec, ReferenceWorker
from hydraflow.workers.reward import RewardSpec, RewardWorker
from hydraflow.workers.reward_model import RewardModelSpec, RewardModelWorker
from hydraflow.workers.rollout import RolloutSpec, RolloutWorker
from hydraflow.workers.skipping import SkipLimits
from hydraflow.workers.teacher import TeacherSpec, TeacherWorker


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
    reward_model: RoleGroup | None
    teachers: dict[str, RoleGroup]
    """By data source; the key `default` stands for all others."""
    link: WeightLink
    """Sends weights from the actor to the rollout."""
    turns: Turns

    @property
    def frozen(self) -> list[RoleGroup]:
        """Models that are not trained."""
        return [
            group for group in (self.ref, self.reward_model, *self.teachers.values()) if group is not None
        ]


@dataclass
class SamplingRoles:
    """The worker groups of a run that samples and trains nothing."""

    rollout: RoleGroup
    reward: RoleGroup
    reward_model: RoleGroup | None
    turns: Turns


def build_roles(config: PPOConfig, plan: BatchPlan, runtime: Runtime, *, skipped: Path) -> Roles:
    """Starts every process of the run and waits until all are ready. `skipped`: the folder for rows of
    skipped optimizer steps."""
    skip_limits = SkipLimits(config.trainer.max_skipped_steps, str(skipped))
    specs = _training_roles(config, plan, skip_limits)
    train: dict[str, RoleGroup] = {}
    devices: dict[str, Devices] = {}
    # a generation engine alone comes first: it reserves a share of the memory that is free at its start
    for place in sorted(_places(config, plan), key=lambda place: set(place.roles) != {"rollout"}):
        if roles := {name: spec for name, spec in specs.items() if name in place.roles}:
            group = runtime.group(TRAIN, roles, place.devices.listed())
            train |= {name: group.role(name) for name in roles}
            devices |= dict.fromkeys(roles, place.devices)
            others = [layout for name, layout in plan.layouts.items() if name not in roles]
            if "rollout" in roles and any(layout.devices & place.devices for layout in others):
                _sleep_from_the_start(config, train["rollout"])
    score = runtime.group(SCORE, {"reward": _reward_role(config)})
    runtime.await_ready()
    turns = Turns()
    link = _link(config, plan, train["actor"], train.get("rollout"), turns)
    for name, used in devices.items():
        if name == "rollout" and not isinstance(link, NoRollout):
            turns.add(train[name], used, link)
        elif name != "advantage":  # it computes on the host
            turns.add(train[name], used, EngineRole(train[name]))
    return Roles(
        actor=train["actor"],
        rollout=train.get("rollout"),
        critic=train.get("critic"),
        ref=train.get("ref"),
        reward_model=train.get("reward_model"),
        teachers={source: train[name] for name, source in teacher_roles(config).items()},
        reward=score.role("reward"),
        advantage=train["advantage"],
        link=link,
        turns=turns,
    )


def _sleep_from_the_start(config: PPOConfig, rollout: RoleGroup) -> None:
    """Puts a generation engine with its own process to sleep once it is ready, so that other roles on its
    devices can start."""
    if GENERATION_ENGINES[config.actor_rollout_ref.rollout.name].own_process:
        rollout.group.await_ready()
        rollout.call(RolloutWorker.sleep)


def pool_of(config: PPOConfig, plan: BatchPlan, machine: Machine) -> ResourcePool:
    """The pool with the devices of the plan's cluster, for all worker groups."""
    places = _places(config, plan)
    on_nodes = [pool.devices_per_node for pool in plan.cluster.pools for _ in range(pool.nodes)]
    users = Counter(device for place in places for device in place.devices.listed())
    return training_pool(machine, devices=on_nodes, groups=max(users.values()))


def _places(config: PPOConfig, plan: BatchPlan) -> list[_Place]:
    """The worker groups: one per set of devices, or with `trainer.fuse_roles=false` one per role. A
    generation engine that needs its own process gets a group, and so do Megatron roles with different
    parallel sizes, because Megatron-Core's process groups are global to a process."""
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
    actor.roles.extend(teacher_roles(config))
    return list(places.values())


def teacher_roles(config: PPOConfig) -> dict[str, str]:
    """Role name of each teacher -> its data source."""
    sources = config.distillation.teachers if config.distillation.enabled else {}
    return {f"teacher_{number}": source for number, source in enumerate(sources)}


def teacher_model(config: PPOConfig, source: str) -> ModelConfig:
    return replace(ModelConfig(), path=str(config.distillation.teachers[source]))


def _link(
    config: PPOConfig, plan: BatchPlan, actor: RoleGroup, rollout: RoleGroup | None, turns: Turns
) -> NoRollout | SameProcess | SeparateProcesses:
    if rollout is None:
        return NoRollout()
    if rollout.group is actor.group:
        return SameProcess(rollout, turns=turns)
    processes = plan.layouts["rollout"].model_parallel
    kind = SharedMemory if _on_one_node(actor, rollout) else Broadcast
    apart = _adapters(config) is not None
    link = kind(rollout, actor, _rollout(config), processes, apart, turns=turns)
    # neither a process with a trained model nor one of an engine's several processes can be replaced
    if len(rollout.group.roles) == 1 and processes == 1:
        rollout.group.recovery = Recovery(link.restore, link.config.max_retries)
    return link


def _on_one_node(actor: RoleGroup, rollout: RoleGroup) -> bool:
    """Whether all generation processes are on the node of the sending process."""
    sender = actor.group.processes[0].node_id
    return all(process.node_id == sender for process in rollout.group.processes.values())


def build_sampling_roles(config: PPOConfig, plan: BatchPlan, runtime: Runtime) -> SamplingRoles:
    """Starts the roles for `trainer.debug.rollout_only`; the generation engine loads `model.path`."""
    turns = Turns()
    devices = plan.layouts["rollout"].devices
    train = runtime.group(TRAIN, {"rollout": _rollout_role(config, plan, None)}, devices.listed())
    rollout = train.role("rollout")
    model: RoleGroup | None = None
    if plan.reward_model:
        theirs = plan.layouts["reward_model"].devices
        if devices & theirs:
            _sleep_from_the_start(config, rollout)
        group = runtime.group(TRAIN, {"reward_model": _reward_model_role(config, plan)}, theirs.listed())
        model = group.role("reward_model")
        turns.add(model, theirs, EngineRole(model))
    score = runtime.group(SCORE, {"reward": _reward_role(config)})
    runtime.await_ready()
    # one of an engine's several processes cannot be replaced
    alone = plan.layouts["rollout"].model_parallel == 1
    retries = config.actor_rollout_ref.rollout.max_retries if alone else 0
    turns.add(rollout, devices, load_model_directory(rollout, retries, turns))
    return SamplingRoles(rollout, score.role("reward"), model, turns)


def _training_roles(config: PPOConfig, plan: BatchPlan, skip_limits: SkipLimits) -> dict[str, RoleSpec]:
    policy = config.actor_rollout_ref
    roles = {"actor": _actor_role(config, plan, skip_limits)}
    if not config.trainer.debug.train_only:
        roles["rollout"] = _rollout_role(config, plan, _adapters(config))
    if plan.critic:
        roles["critic"] = _critic_role(config, plan, skip_limits)
    if own_reference(config):
        assert plan.ref is not None, "a reference has a pass that computes log-probabilities"
        engine = reference_engine(policy, plan.layouts["ref"])
        ref = ReferenceSpec(policy.actor.strategy, policy.model, engine, plan.ref, policy.rollout.temperature)
        roles["ref"] = RoleSpec(ReferenceWorker, (ref,))
    roles |= _teachers(config, plan)
    if plan.reward_model:
        roles["reward_model"] = _reward_model_role(config, plan)
    distillation, in_loss = distillation_of(config)
    advantage = AdvantageSpec(
        config.algorithm,
        config.data.max_response_length,
        drop_failed=config.reward.on_failure == "mask",
        needs_function=function_is_needed(config),
        overlong=overlong_buffer(config),
        distillation=None if in_loss else distillation,
    )
    roles["advantage"] = RoleSpec(AdvantageWorker, (advantage,))
    return roles


def _actor_role(config: PPOConfig, plan: BatchPlan, skip_limits: SkipLimits) -> RoleSpec:
    policy = config.actor_rollout_ref
    distillation, in_loss = distillation_of(config)
    spec = ActorSpec(
        model=policy.model,
        actor=policy.actor,
        plan=plan.actor,
        log_prob=plan.old_log_prob,
        ref=plan.ref,
        temperature=policy.rollout.temperature,
        response_tokens=config.data.max_response_length,
        total_steps=plan.total_steps,
        seed=config.trainer.seed,
        skip_limits=skip_limits,
        correction=rollout_correction(config),
        distillation=distillation if in_loss else None,
        sum_pi_squared=estimator_of(config.algorithm.adv_estimator).sum_pi_squared,
        loss=policy_loss(config),
    )
    return RoleSpec(ActorWorker, (spec,))


def _critic_role(config: PPOConfig, plan: BatchPlan, skip_limits: SkipLimits) -> RoleSpec:
    assert plan.critic is not None and plan.values is not None, "a critic has a pass that computes values"
    spec = CriticSpec(
        replace(config.critic, model=critic_model(config)),
        plan.critic,
        plan.values,
        response_tokens=config.data.max_response_length,
        total_steps=plan.total_steps,
        seed=config.trainer.seed,
        skip_limits=skip_limits,
    )
    return RoleSpec(CriticWorker, (spec,))


def _teachers(config: PPOConfig, plan: BatchPlan) -> dict[str, RoleSpec]:
    """The teachers: frozen models on the actor's devices, with the actor's parallel sizes."""
    policy, loss, roles = config.actor_rollout_ref, config.distillation.distillation_loss, {}
    engine = reference_engine(policy, plan.layouts["actor"])
    if not isinstance(engine, FSDPConfig):  # weights come from the teacher's own directory
        engine = replace(engine, use_dist_checkpointing=False)
    for name, source in teacher_roles(config).items():
        frozen = ReferenceSpec(
            policy.actor.strategy,
            teacher_model(config, source),
            engine,
            plan.old_log_prob,
            policy.rollout.temperature,
            field=f"{TEACHERS}.{source}",
        )
        spec = TeacherSpec(frozen, policy.model, loss.over_vocabulary, loss.most_tokens)
        roles[name] = RoleSpec(TeacherWorker, (spec,))
    return roles


def overlong_buffer(config: PPOConfig) -> OverlongBuffer | None:
    """The penalty for long responses, if there is one."""
    given = config.reward.reward_kwargs
    buffer = given.overlong_buffer_cfg
    if not buffer.enable:
        return None
    limit = given.max_resp_len or config.data.max_response_length
    return OverlongBuffer(limit, buffer.len, buffer.penalty_factor, buffer.log)


TEACHERS = "distillation.teachers"


def distillation_of(config: PPOConfig) -> tuple[Distillation | None, bool]:
    """The distillation loss, if enabled; and whether it is a term of the loss rather than of the
    advantages."""
    loss = config.distillation.distillation_loss
    return Distillation(loss) if config.distillation.enabled else None, not loss.use_policy_gradient


def rollout_correction(config: PPOConfig) -> Correction | None:
    """The correction of the policy loss, if there is one."""
    correction, weighting = config.algorithm.rollout_correction, None
    if not is_corrected(correction):
        return None
    # with ppo_clip in bypass mode, the ratio in the loss already corrects
    if correction.rollout_is and not (correction.bypass_mode and correction.loss_type == "ppo_clip"):
        limits = Bounds.read(correction.rollout_is_threshold)
        assert limits is not None, "`compose/rules.py` checks it"
        normalized = correction.rollout_is_batch_normalize
        weighting = Weighting(correction.rollout_is, limits.upper, limits.lower, normalized)
    return Correction(
        weighting,
        tuple(_rejection(rule, bounds) for rule, bounds in bounded_rules(correction)),
        of_current_policy=correction.bypass_mode,
    )


def _rejection(rule: str, bounds: Bounds) -> Rejection:
    """A rejection rule with its bounds; a ratio's lower bound defaults to the reciprocal of its upper one."""
    lower = bounds.lower
    if lower is None:
        lower = 1 / bounds.upper if rule.endswith("_k1") else 0.0
    return Rejection(rule, bounds.upper, lower)


def critic_model(config: PPOConfig) -> ModelConfig:
    """The critic starts from its own model, or from the actor's."""
    critic = config.critic.model
    return critic if critic.path else replace(critic, path=config.actor_rollout_ref.model.path)


def _rollout(config: PPOConfig) -> RolloutConfig:
    """The section `rollout` with its dtype resolved."""
    policy = config.actor_rollout_ref
    trainer = engine_config(policy.actor.strategy, policy.actor)
    dtype = engine_dtype(policy.rollout.dtype, trainer.compute_dtype)
    return replace(policy.rollout, dtype=dtype)


def _adapters(config: PPOConfig) -> AdapterLayers | None:
    """The adapters that the generation engine applies itself; None: it gets merged weights."""
    model = config.actor_rollout_ref.model
    if model.lora_rank == 0 or model.lora.merge:
        return None
    targets = model.target_modules
    return AdapterLayers(model.lora_rank, targets if isinstance(targets, str) else tuple(targets))


def _rollout_role(config: PPOConfig, plan: BatchPlan, adapters: AdapterLayers | None) -> RoleSpec:
    spec = RolloutSpec(
        config.actor_rollout_ref.model,
        _rollout(config),
        max_prompt=config.data.max_prompt_length,
        max_tokens=config.data.max_response_length,
        seed=config.trainer.seed,
        tensor_parallel=plan.layouts["rollout"].tensor,
        pipeline_parallel=plan.layouts["rollout"].pipeline,
        per_machine=plan.layouts["rollout"].devices_per_node,
        routes=config.actor_rollout_ref.actor.router_replay.by_rollout,
        start_seconds=config.trainer.start_timeout,
        adapters=adapters,
    )
    return RoleSpec(RolloutWorker, (spec,))


def reference_engine(policy: ActorRolloutRefConfig, layout: Layout) -> EngineConfig:
    """The reference's engine; its parallel sizes default to the actor's."""
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


def rewards_are_optional(config: PPOConfig) -> bool:
    """Whether rows may be of a data source without a reward function: a reward model scores them, or training
    uses teachers alone."""
    return config.reward.reward_model.enable or _teachers_alone(config)


def function_is_needed(config: PPOConfig) -> bool:
    """Whether a row on which the reward function failed has nothing else to learn from."""
    reads_its_numbers = estimator_of(config.algorithm.adv_estimator).several_rewards
    scored_by_it = reads_its_numbers or not config.reward.reward_model.enable
    return scored_by_it and not _teachers_alone(config)


def most_failed_share(config: PPOConfig) -> float:
    """`reward.max_failed_share`, or 1.0 where rows need no reward function."""
    return config.reward.max_failed_share if function_is_needed(config) else 1.0


def _teachers_alone(config: PPOConfig) -> bool:
    teachers = config.distillation
    return teachers.enabled and not teachers.distillation_loss.use_task_rewards


def reward_model(config: PPOConfig) -> ModelConfig:
    return replace(ModelConfig(), path=config.reward.reward_model.model_path)


def _reward_model_role(config: PPOConfig, plan: BatchPlan) -> RoleSpec:
    assert plan.reward_model is not None, "a reward model has a pass that computes scores"
    spec = RewardModelSpec(reward_model(config), plan.reward_model)
    return RoleSpec(RewardModelWorker, (spec,))


def _reward_role(config: PPOConfig) -> RoleSpec:
    spec = RewardSpec(config.actor_rollout_ref.model, config.reward, optional=rewards_are_optional(config))
    return RoleSpec(RewardWorker, (spec,))
