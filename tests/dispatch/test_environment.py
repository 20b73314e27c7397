"""What a worker process finds in its environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from dispatch.probes import Described

from hydraflow.dispatch.config import RayInitConfig, RuntimeEnvConfig
from hydraflow.dispatch.environment import node_folder, variables
from hydraflow.dispatch.group import Limits
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.network import interfaces


def test_each_rank_has_caches_of_its_own_and_each_node_one_for_models_code() -> None:
    first, second = (variables(rank, node_ip=None, environ={}) for rank in (0, 1))
    assert first["TRITON_CACHE_DIR"] == str(node_folder() / "triton" / "rank_0")
    assert second["TORCHINDUCTOR_CACHE_DIR"] == str(node_folder() / "inductor" / "rank_1")
    assert first["HF_MODULES_CACHE"] == second["HF_MODULES_CACHE"]
    assert "GLOO_SOCKET_IFNAME" not in first


def test_what_the_user_says_is_kept() -> None:
    given = {"TRITON_CACHE_DIR": "/fast/triton", "HF_MODULES_CACHE": "/mine", "GLOO_SOCKET_IFNAME": "ib3"}
    found = variables(7, node_ip="127.0.0.1", environ=given)
    assert found["TRITON_CACHE_DIR"] == "/fast/triton/rank_7"
    assert "HF_MODULES_CACHE" not in found and "GLOO_SOCKET_IFNAME" not in found


def test_collectives_between_nodes_use_the_interface_by_which_ray_knows_the_node() -> None:
    name, address = next(iter(interfaces().items()))
    assert variables(0, node_ip=address, environ={})["GLOO_SOCKET_IFNAME"] == name
    found = variables(0, node_ip=address, environ={"HYDRAFLOW_NETWORK_INTERFACE": "lo"})
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")


@pytest.fixture
def described(ray_session: None) -> list[dict[str, str]]:
    """The environments of two processes, and what happens to somebody who wants their port."""
    env = RuntimeEnvConfig({"HYDRAFLOW_TEST_COLOUR": "green", "OMP_NUM_THREADS": "1"})
    with Runtime(RayInitConfig(runtime_env=env), Limits(start=120, call=60)) as runtime:
        runtime.start([ResourcePool("pool", [2], threads=2)])
        role = runtime.group("pool", {"described": RoleSpec(Described)}).role("described")
        runtime.await_ready()
        return role.call(Described.surroundings)


def test_variables_reach_every_process_and_the_port_of_rank_0_is_held(described: list[dict[str, str]]) -> None:
    assert [found["HYDRAFLOW_TEST_COLOUR"] for found in described] == ["green", "green"]
    assert [found["OMP_NUM_THREADS"] for found in described] == ["1", "1"], "the user's word, not the pool's"
    assert [Path(found["TRITON_CACHE_DIR"]).name for found in described] == ["rank_0", "rank_1"]
    assert described[0]["port"] == "held" and described[1]["port"] == "held"
    assert "HYDRAFLOW_TEST_COLOUR" not in os.environ
