"""Pools against the cluster: what can never fit is refused with numbers before any process starts."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import pytest
import ray
from dispatch import programs

from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.group import Timeouts
from hydraflow.dispatch.placement import ResourcePool, cpus_needed, release, reserve, shortfall
from hydraflow.dispatch.runtime import ALL_JOINED, Runtime
from hydraflow.errors import ConfigError

NODE = {"CPU": 8.0, "GPU": 2.0}


def test_what_fits_is_not_refused() -> None:
    pools = [ResourcePool("train", [2, 2], gpus=1), ResourcePool("reward", [4])]
    assert shortfall(pools, [NODE, NODE]) == [] and cpus_needed(pools) == 8


@pytest.mark.parametrize(
    ("pool", "rule"),
    [
        (ResourcePool("train", [1, 1, 1]), "needs 3 nodes, the cluster has 2"),
        (ResourcePool("train", [9, 8]), "need 17 CPUs together, the cluster has 16"),
        (ResourcePool("train", [9, 1]), "needs 9 CPUs on one node, the largest has 8"),
        (ResourcePool("train", [3, 2], gpus=1), "need 5 GPUs together, the cluster has 4"),
        (ResourcePool("train", [3, 1], gpus=1), "needs 3 GPUs on one node, the largest has 2"),
    ],
)
def test_what_never_fits_is_named(pool: ResourcePool, rule: str) -> None:
    problems = shortfall([pool], [NODE, NODE])
    assert [problem.rule for problem in problems] == [rule] and all(
        "train" in problem.field for problem in problems
    )


def test_a_pool_without_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one device on every node"):
        ResourcePool("train", [2, 0])


def test_too_large_for_the_cluster_fails_at_once(ray_session: None) -> None:
    since = time.monotonic()
    with pytest.raises(
        ConfigError, match=r"resource pools train: need 9 CPUs together, the cluster has 8"
    ) as caught:
        reserve([ResourcePool("train", [9])], timeout=60, growing=False)
    assert caught.value.exit_code == 2 and time.monotonic() - since < 5


def test_what_only_a_joined_cluster_shows_is_not_said_to_be_before_the_start(ray_session: None) -> None:
    runtime = Runtime(RayInitConfig(), Timeouts(start=60, call=60))
    with pytest.raises(
        ConfigError,
        match=r"^1 problem found after the run had started:\n.*need 9 CPUs together, the cluster has 8",
    ):
        runtime.start([ResourcePool("train", [9])])


def test_a_cluster_that_may_grow_is_given_its_time(ray_session: None) -> None:
    since = time.monotonic()
    with pytest.raises(ConfigError, match="needs 2 nodes, the cluster has 1"):
        reserve([ResourcePool("train", [1, 1], cpus=0.1)], timeout=1, growing=True)
    assert 1 <= time.monotonic() - since < 10


def test_a_job_whose_nodes_have_all_joined_does_not_wait_for_one_that_is_gone(
    ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALL_JOINED, "1")
    runtime = Runtime(RayInitConfig(address="auto"), Timeouts(start=60, call=60))
    since = time.monotonic()
    with pytest.raises(ConfigError, match="needs 2 nodes, the cluster has 1"):
        runtime.start([ResourcePool("train", [1, 1], cpus=0.1)])
    assert time.monotonic() - since < 10


def test_a_busy_cluster_is_named_after_a_bounded_wait(ray_session: None) -> None:
    free = int(ray.available_resources()["CPU"])
    held = reserve([ResourcePool("first", [free])], timeout=30, growing=False)
    with pytest.raises(
        ConfigError,
        match=rf"not free within 1 s: needed per node second \[{{'CPU': {float(free)}}}\]; free in total",
    ):
        reserve([ResourcePool("second", [free])], timeout=1, growing=False)
    release(list(held.values()))
    again = reserve([ResourcePool("second", [free])], timeout=30, growing=False)
    assert [rank_info.local_rank for rank_info in again["second"].rank_infos] == list(range(free))
    release(list(again.values()))


@pytest.mark.slow
def test_all_processes_on_a_device_see_the_same_gpu_and_no_other() -> None:
    groups = [[0, 1, 2, 3], [1, 2], [3, 2]]
    text = f"{programs.FORKS_WORKERS}\nfrom dispatch.fake_gpus import main; main({groups})"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # paths of sockets must be short
        process, log = programs.start(Path(folder), text, RAY_TMPDIR=folder)
        assert process.wait(timeout=120) == 0, log.read_text()
        [said] = [line for line in log.read_text().splitlines() if line.startswith("[[[")]
    found = json.loads(said)
    seen: dict[int, set[tuple[str, str]]] = {}
    for devices, places in zip(groups, found, strict=True):
        for device, (node, gpus, _) in zip(devices, places, strict=True):
            seen.setdefault(device, set()).add((node, gpus))
    assert all(len(gpus) == 1 for gpus in seen.values()) and len(set.union(*seen.values())) == 4, found
    nodes, gpus = zip(*(next(iter(seen[device])) for device in range(4)), strict=True)
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3] and sorted(gpus) == ["0", "0", "1", "1"]
    assert [[local for _, _, local in places] for places in found] == [[0, 1, 0, 1], [0, 0], [0, 1]]
