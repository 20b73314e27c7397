"""What a worker process finds in its environment."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest
from dispatch.probes import Described, Probe

from hydraflow.dispatch.config import RayInitConfig, RuntimeEnvConfig
from hydraflow.dispatch.environment import settle_command, variables
from hydraflow.dispatch.group import Timeouts, WorkerGroup
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.errors import ConfigError, EnvironmentFault
from hydraflow.system.network import interfaces
from hydraflow.system.node_folder import make_node_folder, node_folder


def test_each_rank_has_caches_of_its_own_and_each_node_one_for_models_code() -> None:
    first, second = (variables(rank, node_ip="198.51.100.7", environ={}) for rank in (0, 1))
    assert first["TRITON_CACHE_DIR"] == str(node_folder() / "triton" / "rank_0")
    assert second["TORCHINDUCTOR_CACHE_DIR"] == str(node_folder() / "inductor" / "rank_1")
    assert first["HF_MODULES_CACHE"] == second["HF_MODULES_CACHE"]
    assert "GLOO_SOCKET_IFNAME" not in first and second["GOMP_SPINCOUNT"] == "1000"


def test_what_the_user_says_is_kept() -> None:
    given = {"TRITON_CACHE_DIR": "/fast/triton", "HF_MODULES_CACHE": "/mine", "GLOO_SOCKET_IFNAME": "ib3"}
    found = variables(7, node_ip="127.0.0.1", environ=given)
    assert found["TRITON_CACHE_DIR"] == "/fast/triton/rank_7"
    assert "HF_MODULES_CACHE" not in found and "GLOO_SOCKET_IFNAME" not in found
    for said in ({"GOMP_SPINCOUNT": "0"}, {"OMP_WAIT_POLICY": "active"}):
        assert "GOMP_SPINCOUNT" not in variables(0, node_ip="127.0.0.1", environ=said)


def test_collectives_between_nodes_use_the_interface_by_which_ray_knows_the_node() -> None:
    name, address = next(iter(interfaces().items()))
    assert variables(0, node_ip=address, environ={})["GLOO_SOCKET_IFNAME"] == name
    found = variables(0, node_ip=address, environ={"HYDRAFLOW_NETWORK_INTERFACE": "lo"})
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")


@pytest.fixture
def described(ray_session: None) -> list[dict[str, str]]:
    """The environments of two processes, and what happens to another process that wants their port."""
    env = RuntimeEnvConfig({"HYDRAFLOW_TEST_COLOUR": "green", "OMP_NUM_THREADS": 1})
    with Runtime(RayInitConfig(runtime_env=env), Timeouts(start=120, call=60)) as runtime:
        runtime.start([ResourcePool("pool", [2], threads=2)])
        role = runtime.group("pool", {"described": RoleSpec(Described)}).role("described")
        runtime.await_ready()
        return role.call(Described.surroundings)


def test_variables_reach_every_process_and_the_port_of_rank_0_is_held(
    described: list[dict[str, str]],
) -> None:
    assert [found["HYDRAFLOW_TEST_COLOUR"] for found in described] == ["green", "green"]
    assert [found["OMP_NUM_THREADS"] for found in described] == ["1", "1"], "the user's word, not the pool's"
    assert [Path(found["TRITON_CACHE_DIR"]).name for found in described] == ["rank_0", "rank_1"]
    assert described[0]["port"] == "held" and described[1]["port"] == "held"
    assert "HYDRAFLOW_TEST_COLOUR" not in os.environ


def test_an_interface_that_is_not_there_is_reported_in_the_users_words(ray_session: None) -> None:
    env = RuntimeEnvConfig({"HYDRAFLOW_NETWORK_INTERFACE": "ib77"})
    with Runtime(RayInitConfig(runtime_env=env), Timeouts(start=120, call=60)) as runtime:
        runtime.start([ResourcePool("pool", [1])])
        runtime.group("pool", {"described": RoleSpec(Described)})
        with pytest.raises(
            ConfigError,
            match="HYDRAFLOW_NETWORK_INTERFACE=ib77: .* has no such interface with an address; it has lo",
        ):
            runtime.await_ready()


def test_the_folder_on_the_node_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name can be guessed, and code is run from it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HF_MODULES_CACHE", "")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    settle_command()
    assert os.environ["HF_MODULES_CACHE"] == str(tmp_path / f"hydraflow-{os.getuid()}" / "hf_modules")
    node_folder().chmod(0o777)
    assert stat.S_IMODE(make_node_folder().stat().st_mode) == 0o700
    node_folder().rmdir()
    (tmp_path / "elsewhere").mkdir()
    node_folder().symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        EnvironmentFault, match="is not a private folder of this user; set TMPDIR=<a folder of your own>"
    ):
        make_node_folder()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder to another user")
def test_a_folder_that_somebody_else_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    node_folder().mkdir()
    os.chown(node_folder(), 65534, -1)
    with pytest.raises(EnvironmentFault, match="is not a private folder of this user"):
        make_node_folder()


def test_a_second_start_in_a_process_finds_its_own_folders() -> None:
    first = variables(1, node_ip="127.0.0.1", environ={"TORCHINDUCTOR_CACHE_DIR": "/mine"})
    assert first["TORCHINDUCTOR_CACHE_DIR"] == "/mine/rank_1"
    again = variables(1, node_ip="127.0.0.1", environ={**first})
    assert again["TORCHINDUCTOR_CACHE_DIR"] == "/mine/rank_1"


@pytest.mark.skipif(any(name.startswith("MALLOC_") for name in os.environ), reason="the user's word counts")
def test_workers_keep_the_memory_that_they_free(groups: dict[int, WorkerGroup]) -> None:
    """Ten tensors of 16,384 pages; by default all of these are new ones. glibc itself keeps up to 32 MiB."""
    assert groups[1].role("probe").call(Probe.new_pages)[0] < 400
