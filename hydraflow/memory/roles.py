"""Each role's memory, from the plan and the configuration: its engine, model shape and micro-batches.

In: `BatchPlan`, `PPOConfig`, shapes, limits. Out: one `RoleMemory` per role that the plan lays out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hydraflow.batch_plan.layout import Layout
from hydraflow.batch_plan.parts import MicroPlan, RolePlan
from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.engine.config import GATHERED_BYTES, engine_config
from hydraflow.generation.config import GENERATION_ENGINES, bucket_bytes, engine_dtype
from hydraflow.memory.activations import MicroBatchTokens, RowSizes, tokens_of
from hydraflow.memory.fsdp import FSDPModelMemory, adapter_numbers, units_of
from hydraflow.memory.generation import NativeEngineMemory, ServingEngineMemory
from hydraflow.memory.limits import BytesPerNumber, MemoryLimits
from hydraflow.memory.megatron import MegatronModelMemory
from hydraflow.memory.report import MemoryParts, RoleMemory, fullest
from hydraflow.memory.shape import ModelShape
from hydraflow.models.config import ModelConfig
from hydraflow.schema import PPOConfig
from hydraflow.workers.config import ActorConfig, CriticConfig, RefConfig

ALONE = frozenset(name for name, engine in GENERATION_ENGINES.items() if engine.own_process)
"""Generation engines that start without weights, and get them from another process."""


@dataclass(frozen=True)
class EstimateInputs:
    """A planned run, the shapes of its models, and the memory of its machines."""

    plan: BatchPlan
    config: PPOConfig
    shape: ModelShape
    critic_shape: ModelShape
    limits: MemoryLimits

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row."""
        return self.config.data.max_prompt_length + self.config.data.max_response_length

    def rows(self, model: ModelConfig) -> RowSizes:
        """The longest rows, as that model's engine lays them out."""
        data, samples = self.config.data, self.plan.samples_per_prompt
        return RowSizes(data.max_prompt_length, data.max_response_length, samples, model.use_remove_padding)


def role_memory(inputs: EstimateInputs, role: str, layout: Layout) -> RoleMemory:
    """One role on each of its devices."""
    resting, phases = ROLES[role](inputs, layout)
    return RoleMemory(role, layout.engine, len(layout.devices), resting, phases)


Estimate = tuple[MemoryParts, dict[str, MemoryParts]]
"""Memory of a role at rest, and its peak in each phase."""


def _actor(inputs: EstimateInputs, layout: Layout) -> Estimate:
    policy, plan = inputs.config.actor_rollout_ref, inputs.plan
    model = policy.model
    engine = _engine(inputs, layout, inputs.shape, model, policy.actor, trained=True, policy=True)
    forwards = [engine.forward(_tokens(inputs, layout, plan.old_log_prob, model))]
    if plan.ref and model.lora_rank:
        forwards.append(engine.forward(_tokens(inputs, layout, plan.ref, model)))
    update = engine.update(
        _tokens(inputs, layout, plan.actor.micro, model, plan.actor.rows_per_rank),
        micro_batches(plan.actor, inputs.longest_row),
        trained_entropy=policy.actor.entropy_coeff != 0 or policy.actor.adaptive_entropy.enabled,
    )
    sending = replace(engine.resting, weights=engine.held.weights)
    sync = sending + (engine.sent() if isinstance(engine, MegatronModelMemory) else _sent(inputs, layout))
    if policy.rollout.name in ALONE:
        sync += MemoryParts(weight_sync=_weight_bucket(inputs))
    if slots_are_on_device(inputs):
        sync += MemoryParts(weight_sync=slot_bytes(inputs))
    return engine.resting, {"log_probs": fullest(*forwards), "update": update, "sync": sync}


def _critic(inputs: EstimateInputs, layout: Layout) -> Estimate:
    critic, plan = inputs.config.critic, inputs.plan
    assert plan.critic is not None and plan.values is not None, "a critic has a plan"
    tokens = _tokens(inputs, layout, plan.critic.micro, critic.model, plan.critic.rows_per_rank)
    values = _tokens(inputs, layout, plan.values, critic.model)
    engine = _engine(inputs, layout, inputs.critic_shape, critic.model, critic, trained=True, policy=False)
    update = engine.update(tokens, micro_batches(plan.critic, inputs.longest_row))
    return engine.resting, {"log_probs": engine.forward(values), "update": update}


def _reference(inputs: EstimateInputs, layout: Layout) -> Estimate:
    policy = inputs.config.actor_rollout_ref
    assert inputs.plan.ref is not None, "a reference has a plan"
    tokens = _tokens(inputs, layout, inputs.plan.ref, policy.model)
    engine = _engine(inputs, layout, inputs.shape, policy.model, policy.ref, trained=False, policy=True)
    return engine.resting, {"log_probs": engine.forward(tokens)}


def _rollout(inputs: EstimateInputs, layout: Layout) -> Estimate:
    rollout, plan = inputs.config.actor_rollout_ref.rollout, inputs.plan.rollout
    number = _engine_number(inputs)
    rows = inputs.rows(inputs.config.actor_rollout_ref.model)
    sequences = max(1, min(rollout.max_num_seqs, plan.trajectories_per_engine))
    if layout.engine not in ALONE:
        top_p = min(rollout.top_p, rollout.val_kwargs.top_p) < 1
        engine = NativeEngineMemory(inputs.shape, number, top_p, inputs.limits.copies.get(number))
        return engine.resting, {"sample": engine.sample(rows, sequences), "sync": engine.resting}
    others = [other for name, other in inputs.plan.layouts.items() if name != "rollout"]
    shared = any(len(layout.devices & other.devices) for other in others)
    share, whole = rollout.gpu_memory_utilization, inputs.limits.device_bytes
    serving = ServingEngineMemory(inputs.shape, number, layout.tensor, layout.pipeline, share, whole, shared)
    received = MemoryParts(weights=serving.weights, weight_sync=_weight_bucket(inputs))
    if inputs.limits.device_type == "cpu":
        longest, host = rollout.max_model_len or rows.prompt + rows.response, inputs.limits.host_bytes
        most = None if host is None else int(share * host / min(len(layout.devices), layout.devices_per_node))
        awake = serving.sample_on_cpu(rollout.max_num_seqs, longest, most)
        # the cache is reallocated with the first bucket and cleared after the last
        received = replace(awake, weight_sync=received.weight_sync)
        return serving.resting if shared else awake, {"sample": awake, "sync": received}
    sampling = serving.sample(sequences, rows.prompt + rows.response)
    return serving.resting, {"sample": sampling, "sync": received}


def _reward_model(inputs: EstimateInputs, layout: Layout) -> Estimate:
    """Estimated as an untrained critic of the policy's shape: its own config.json is not read."""
    model = inputs.config.critic.model
    micro = inputs.plan.reward_model or inputs.plan.old_log_prob
    tokens = _tokens(inputs, layout, micro, model)
    engine = _engine(inputs, layout, inputs.shape, model, RefConfig(), trained=False, policy=False)
    return engine.resting, {"log_probs": engine.forward(tokens)}


ROLES: dict[str, Callable[[EstimateInputs, Layout], Estimate]] = {
    "actor": _actor,
    "critic": _critic,
    "ref": _reference,
    "rollout": _rollout,
    "reward_model": _reward_model,
}


def _engine(
    inputs: EstimateInputs,
    layout: Layout,
    shape: ModelShape,
    model: ModelConfig,
    role: ActorConfig | CriticConfig | RefConfig,
    *,
    trained: bool,
    policy: bool,
) -> FSDPModelMemory | MegatronModelMemory:
    on_host = inputs.limits.device_type == "cpu"  # where offloading has no effect
    if layout.engine == "megatron":
        settings, number = role.megatron, inputs.limits.bytes_of(role.megatron.dtype)
        whole = settings.recomputes_each_layer(checkpointing=model.enable_gradient_checkpointing)
        if on_host:
            settings = replace(settings, param_offload=False, grad_offload=False, optimizer_offload=False)
        return MegatronModelMemory(
            shape, layout, settings, number, trained, trained and whole, policy, on_host
        )
    fsdp = role.fsdp_config
    if on_host:
        fsdp = replace(fsdp, offload_policy=False, param_offload=False, optimizer_offload=False)
    adapters = adapter_numbers(shape, model.lora_rank, model.target_modules) if trained else 0
    least = fsdp.wrap_policy.least(
        max(1, layout.shard), inputs.limits.device_type, offloaded=fsdp.offload_policy
    )
    return FSDPModelMemory(
        shape=shape,
        units=units_of(shape, policy=policy, least=least, trained=trained, adapters=adapters),
        types=BytesPerNumber.of(fsdp, inputs.limits),
        ranks=max(1, layout.shard),
        device_type=inputs.limits.device_type,
        settings=fsdp,
        checkpointing=trained and model.enable_gradient_checkpointing,
        policy=policy,
    )


def _tokens(
    inputs: EstimateInputs, layout: Layout, micro: MicroPlan, model: ModelConfig, rows: int | None = None
) -> MicroBatchTokens:
    """`rows`: largest number of rows of a data rank; None: its share of a step's trajectories."""
    if rows is None:
        rows = -(-inputs.plan.trajectories_per_step // layout.data_ranks)
    return tokens_of(micro, inputs.rows(model), most_rows=max(1, rows), ulysses=layout.context)


def micro_batches(plan: RolePlan, longest_row: int) -> int:
    """Micro-batches of one optimizer step; with a token budget, when every row is at its longest."""
    if plan.micro.rows is not None:
        return -(-plan.rows_per_rank // plan.micro.rows)
    return -(-plan.rows_per_rank // max(1, (plan.micro.max_tokens or 0) // longest_row))


def _sent(inputs: EstimateInputs, layout: Layout) -> MemoryParts:
    """Memory of sending from FSDP: a bucket of full tensors, its shards, and the tensors split from it."""
    policy, shape = inputs.config.actor_rollout_ref, inputs.shape
    kept = BytesPerNumber.of(policy.actor.fsdp_config, inputs.limits).kept
    bucket = max(min(GATHERED_BYTES, shape.parameters * kept), shape.largest_tensor * kept)
    sent = 2 * bucket + bucket // max(1, layout.shard)
    if policy.model.lora_rank:
        # all adapters are gathered first, and each merged matrix needs a product and a sum
        adapters = adapter_numbers(shape, policy.model.lora_rank, policy.model.target_modules) * shape.layers
        sent += adapters * kept + 2 * (shape.hidden * max(shape.q_width, shape.intermediate)) * kept
    return MemoryParts(weight_sync=sent)


def slot_bytes(inputs: EstimateInputs) -> int:
    """Bytes of the weight buckets, at most two, in which the actor's rank 0 sends weights to a rollout in
    another process; 0 if it is in the same process."""
    layouts, rollout = inputs.plan.layouts, inputs.config.actor_rollout_ref.rollout
    apart = rollout.name in ALONE or not inputs.config.trainer.fuse_roles
    if "rollout" not in layouts or not (apart or layouts["rollout"].devices != layouts["actor"].devices):
        return 0
    return min(2 * _weight_bucket(inputs), inputs.shape.parameters * _engine_number(inputs))


def slots_are_on_device(inputs: EstimateInputs) -> bool:
    """Whether the buckets of `slot_bytes` are on the GPU of the actor's rank 0: only if no other GPU samples.
    Otherwise they are in host memory."""
    layouts = inputs.plan.layouts
    if inputs.limits.device_type == "cpu" or "rollout" not in layouts:
        return False
    samples = layouts["rollout"].devices
    return len(samples) == 1 and samples.ranges[0].start == layouts["actor"].devices.ranges[0].start


def _weight_bucket(inputs: EstimateInputs) -> int:
    """Bytes of a weight bucket for a rollout in another process."""
    weights = inputs.shape.parameters * _engine_number(inputs)
    return min(bucket_bytes(inputs.config.actor_rollout_ref.rollout), weights)


def _engine_number(inputs: EstimateInputs) -> int:
    """Bytes of a number of the generation engine."""
    policy = inputs.config.actor_rollout_ref
    trainer = engine_config(policy.actor.strategy, policy.actor)
    return inputs.limits.bytes_of(engine_dtype(policy.rollout.dtype, trainer.compute_dtype))
