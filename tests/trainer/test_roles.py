"""Worker groups on the plan's devices: which there are, and how many share a device."""

from __future__ import annotations

from typing import Any

import pytest
from batch_plan.plans import resolve, small

from hydraflow.dispatch.placement import ResourcePool
from hydraflow.engine.config import MegatronConfig
from hydraflow.trainer.machine import Machine
from hydraflow.trainer.roles import (
    _rollout,
    _teachers,
    function_is_needed,
    most_failed_share,
    pool_of,
    reference_engine,
)


def pool(device: str, devices: int, **values: Any) -> ResourcePool:
    config = small(**values)
    return pool_of(config, resolve(config, devices=devices), Machine(device, 1, devices, 1))


OVERLAPPING = dict(actor__device_mapping="0-1", rollout__device_mapping="1-2")


@pytest.mark.parametrize(
    ("values", "most"),
    [
        ({}, 1),
        (dict(trainer__fuse_roles=False), 2),
        (dict(trainer__fuse_roles=False, algorithm__use_kl_in_reward=True), 3),
        (OVERLAPPING, 2),
        (dict(actor__device_mapping="0-1", rollout__device_mapping="2"), 1),
    ],
)
def test_a_device_has_a_process_of_each_group_on_it(values: dict[str, Any], most: int) -> None:
    assert pool("cpu", 3 if "actor__device_mapping" in values else 2, **values).groups == most


@pytest.mark.parametrize(
    ("values", "needed"),
    [
        ({}, True),
        (dict(reward__reward_model__enable=True), False),
        (dict(reward__reward_model__enable=True, algorithm__adv_estimator="gdpo"), True),
        (dict(distillation__enabled=True), True),
        (dict(distillation__enabled=True, distillation__distillation_loss__use_task_rewards=False), False),
    ],
)
def test_who_else_than_the_reward_function_teaches_a_row(values: dict[str, Any], needed: bool) -> None:
    config = small(**values)
    assert function_is_needed(config) == needed
    assert most_failed_share(config) == (0.5 if needed else 1.0)


def test_machines_of_a_roles_own_are_nodes_of_the_pool() -> None:
    own = pool("cuda", 4, rollout__nnodes=2, rollout__n_gpus_per_node=2)
    assert own.devices_on_nodes == [4, 2, 2] and own.groups == 1 and own.gpus == 1


def test_a_gpu_is_shared_by_the_groups_on_it() -> None:
    assert pool("cuda", 2).groups == 1
    assert pool("cuda", 2, rollout__name="vllm") == ResourcePool("train", [2], gpus=1, groups=2)
    alone = dict(actor__device_mapping="[0,1]", rollout__device_mapping="[2,3]")
    assert pool("cuda", 4, rollout__name="vllm", **alone).groups == 1


@pytest.mark.parametrize(
    ("asked", "trainer", "sampled"),
    [
        ("auto", dict(dtype="fp32"), "fp32"),
        ("auto", dict(model_dtype="fp64"), "fp64"),
        ("auto", {}, "auto"),
        ("bf16", dict(dtype="fp32"), "bf16"),
    ],
)
def test_the_engine_has_the_trainers_dtype_unless_it_is_given(
    asked: str, trainer: dict[str, str], sampled: str
) -> None:
    values = {f"actor__fsdp_config__{name}": value for name, value in trainer.items()}
    assert _rollout(small(rollout__dtype=asked, **values)).dtype == sampled


SIZES = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")


@pytest.mark.parametrize("size", SIZES)
def test_megatron_roles_of_other_sizes_have_processes_of_their_own(size: str) -> None:
    """Its groups of ranks are a process's."""
    given = dict(actor__strategy="megatron", critic__strategy="megatron", algorithm__adv_estimator="gae")
    key = f"megatron__{size}_parallel_size"
    assert pool("cpu", 2, **given, **{f"actor__{key}": 2}).groups == 2
    assert pool("cpu", 2, **given, **{f"actor__{key}": 2, f"critic__{key}": 2}).groups == 1


def test_a_teacher_has_weights_of_its_own_with_the_references_engine() -> None:
    config = small(actor__strategy="megatron", algorithm__adv_estimator="grpo")
    config.distillation.enabled, config.distillation.teachers = True, {"default": "/teacher"}
    megatron = config.actor_rollout_ref.ref.megatron
    megatron.use_dist_checkpointing, megatron.dist_checkpointing_path = True, "/checkpoint"
    plan = resolve(config, devices=1)
    reference = reference_engine(config.actor_rollout_ref, plan.layouts["actor"])
    assert isinstance(reference, MegatronConfig) and reference.use_dist_checkpointing
    [teacher] = _teachers(config, plan).values()
    assert not teacher.args[0].frozen.engine.use_dist_checkpointing
