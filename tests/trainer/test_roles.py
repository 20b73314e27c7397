"""Worker groups on the plan's devices: which there are, and what a GPU does not hold."""

from __future__ import annotations

from typing import Any

import pytest
from batch_plan.plans import ACTOR, ROLLOUT, resolve, small

from hydraflow.dispatch.placement import ResourcePool
from hydraflow.errors import ConfigError
from hydraflow.trainer.machine import Machine
from hydraflow.trainer.roles import pool_of


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


def test_machines_of_a_roles_own_are_nodes_of_the_pool() -> None:
    own = pool("cuda", 4, rollout__nnodes=2, rollout__n_gpus_per_node=2)
    assert own.processes_on_nodes == [4, 2, 2] and own.groups == 1 and own.gpus_per_process == 1


def test_one_gpu_holds_processes_of_one_group() -> None:
    with pytest.raises(ConfigError, match="trainer.fuse_roles=false: .*actor and rollout .*GPUs 0-1"):
        pool("cuda", 2, trainer__fuse_roles=False)
    with pytest.raises(ConfigError) as caught:
        pool("cuda", 3, **OVERLAPPING)
    [problem] = caught.value.problems
    assert problem.field == f"{ROLLOUT}.device_mapping" and problem.value == "1-2"
    assert "shares GPUs 1 with the actor, which is on 0-1" in problem.rule
    assert f"{ROLLOUT}.device_mapping=0-1" in problem.remedy and ACTOR not in problem.remedy
    assert pool("cuda", 2).groups == 1


def test_vllm_needs_gpus_of_its_own() -> None:
    with pytest.raises(ConfigError) as caught:
        pool("cuda", 2, rollout__name="vllm")
    [problem] = caught.value.problems
    assert (problem.field, problem.value) == (f"{ROLLOUT}.name", "vllm")
    assert "on GPUs that the actor has; several processes on one GPU" in problem.rule
    assert f"{ROLLOUT}.device_mapping=" in problem.remedy
    alone = dict(actor__device_mapping="[0,1]", rollout__device_mapping="[2,3]")
    pool("cuda", 4, rollout__name="vllm", **alone)
