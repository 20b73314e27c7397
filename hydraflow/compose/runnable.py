"""What the configuration can ask for and the plan can work out, but `main_ppo` cannot run yet.

In: a configuration. Out: one problem per key, which says what it would have done. A line leaves this file
when its feature comes. Left out on purpose: whether the numbers add up (`batch_plan/`), and which values are
legal (`rules.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from hydraflow.engine.config import FSDPConfig
from hydraflow.errors import Problem
from hydraflow.schema import PPOConfig

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
REWARD = "reward.reward_model"


def problems(config: PPOConfig) -> list[Problem]:
    """Every key that asks for something that cannot run yet.

    >>> config = PPOConfig()
    >>> config.actor_rollout_ref.rollout.name = "vllm"
    >>> print(*problems(config))
    actor_rollout_ref.rollout.name=vllm: can be planned, not run yet: it would sample with vLLM
          -> actor_rollout_ref.rollout.name=native
    """
    asked = (_engines, _sharding, _rollout, _mappings, _asynchronous, _filter, _reward_model)
    return [problem for ask in asked for problem in ask(config)]


def _not_yet(key: str, value: object, what: str, remedy: str) -> Problem:
    return Problem(key, value, f"can be planned, not run yet: it would {what}", remedy)


def _engines(config: PPOConfig) -> Iterator[Problem]:
    for key, strategy in (
        (ACTOR, config.actor_rollout_ref.actor.strategy),
        ("critic", config.critic.strategy),
    ):
        if strategy == "megatron":
            yield _not_yet(f"{key}.strategy", strategy, "train with Megatron-Core", f"{key}.strategy=fsdp2")
    if config.actor_rollout_ref.rollout.name == "vllm":
        yield _not_yet(f"{ROLLOUT}.name", "vllm", "sample with vLLM", f"{ROLLOUT}.name=native")


def _sharding(config: PPOConfig) -> Iterator[Problem]:
    policy = config.actor_rollout_ref
    sections: list[tuple[str, FSDPConfig]] = [
        (ACTOR, policy.actor.fsdp_config),
        (REF, policy.ref.fsdp_config),
    ]
    for section, fsdp in [*sections, ("critic", config.critic.fsdp_config)]:
        prefix = f"{section}.fsdp_config"
        if (size := fsdp.ulysses_sequence_parallel_size) > 1:
            what = f"share the tokens of a row among {size} devices"
            yield _not_yet(
                f"{prefix}.ulysses_sequence_parallel_size",
                size,
                what,
                f"{prefix}.ulysses_sequence_parallel_size=1",
            )
        if fsdp.fsdp_size not in (-1, _devices(config)):
            what = f"shard each copy of the model among {fsdp.fsdp_size} devices"
            yield _not_yet(f"{prefix}.fsdp_size", fsdp.fsdp_size, what, f"{prefix}.fsdp_size=-1")


def _devices(config: PPOConfig) -> int | None:
    """Training devices, where the configuration says how many."""
    per_node = config.trainer.n_gpus_per_node
    return per_node and per_node * config.trainer.nnodes


def _rollout(config: PPOConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    sizes = {
        "tensor_model_parallel_size": rollout.tensor_model_parallel_size,
        "data_parallel_size": rollout.data_parallel_size,
        "pipeline_model_parallel_size": rollout.pipeline_model_parallel_size,
    }
    for name, size in sizes.items():
        if size > 1:
            yield _not_yet(
                f"{ROLLOUT}.{name}",
                size,
                f"give each replica of the rollout {size} times the devices",
                f"{ROLLOUT}.{name}=1",
            )


def _mappings(config: PPOConfig) -> Iterator[Problem]:
    policy = config.actor_rollout_ref
    mappings = {
        ACTOR: policy.actor.device_mapping,
        "critic": config.critic.device_mapping,
        REF: policy.ref.device_mapping,
        ROLLOUT: policy.rollout.device_mapping,
    }
    for section, mapping in mappings.items():
        if mapping is not None:
            key = f"{section}.device_mapping"
            yield _not_yet(
                key, mapping, "place the role on these devices instead of all of the trainer's", f"{key}=null"
            )
    if (nodes := policy.rollout.nnodes) > 0:
        yield _not_yet(
            f"{ROLLOUT}.nnodes", nodes, f"give the rollout {nodes} machines of its own", f"{ROLLOUT}.nnodes=0"
        )


def _asynchronous(config: PPOConfig) -> Iterator[Problem]:
    training, prefix = config.async_training, "async_training"
    if training.staleness_threshold > 0:
        what = f"let {training.staleness_threshold:.0%} of a step's trajectories come from older weights"
        yield _not_yet(
            f"{prefix}.staleness_threshold",
            training.staleness_threshold,
            what,
            f"{prefix}.staleness_threshold=0",
        )
    if (rounds := training.trigger_parameter_sync_step) > 1:
        what = f"give new weights to the rollout after every {rounds} rounds of training"
        yield _not_yet(
            f"{prefix}.trigger_parameter_sync_step", rounds, what, f"{prefix}.trigger_parameter_sync_step=1"
        )
    if (batches := training.require_batches) > 1:
        what = f"start a round of training when {batches} mini-batches are there"
        yield _not_yet(f"{prefix}.require_batches", batches, what, f"{prefix}.require_batches=1")
    if training.partial_rollout:
        what = "interrupt responses at a weight update and go on with the new weights"
        yield _not_yet(f"{prefix}.partial_rollout", "true", what, f"{prefix}.partial_rollout=false")


def _filter(config: PPOConfig) -> Iterator[Problem]:
    groups, key = config.algorithm.filter_groups, "algorithm.filter_groups.enable"
    if groups.enable:
        yield _not_yet(
            key, "true", f"replace prompts whose responses all have the same {groups.metric}", f"{key}=false"
        )


def _reward_model(config: PPOConfig) -> Iterator[Problem]:
    reward = config.reward.reward_model
    if reward.enable:
        yield _not_yet(
            f"{REWARD}.enable",
            "true",
            f"score responses with the model {reward.model_path}",
            f"{REWARD}.enable=false",
        )
