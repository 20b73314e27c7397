"""Shared memory, open files, temporary files, processors: judged by numbers, and by a real limit in a process
of its own."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import State
from hydraflow.checkup.limits import (
    check_temporary_files,
    judge_open_files,
    judge_processors,
    judge_shared_memory,
    judge_temporary_files,
    object_store_bytes,
)
from hydraflow.compose.loading import load
from hydraflow.errors import ConfigError
from hydraflow.schema import PPOConfig
from hydraflow.trainer.machine import Machine


def test_ray_takes_a_third_of_the_memory_but_not_more_than_shared_memory() -> None:
    assert object_store_bytes(20 * 10**9, 64 * 10**9) == 6 * 10**9
    assert object_store_bytes(100 * 10**9, 20 * 10**9) == 19 * 10**9
    assert object_store_bytes(2000 * 10**9, 1000 * 10**9) == 200 * 10**9


def test_shared_memory(tmp_path: Path) -> None:
    assert judge_shared_memory(tmp_path, available_memory=10**6).state is State.OK
    small = judge_shared_memory(Path("/dev/shm"), available_memory=10**18)
    assert small.state in (State.OK, State.WARNING)
    absent = judge_shared_memory(tmp_path / "none", available_memory=10**9)
    assert absent.state is State.WARNING


def test_shared_memory_that_is_too_small_names_the_size_to_ask_for() -> None:
    # /proc is a file system without any room
    found = judge_shared_memory(Path("/proc"), available_memory=10 * 2**30)
    assert found.state is State.WARNING and "needs 3.00 GiB" in found.evidence
    assert found.remedy.startswith("docker run --shm-size=4g")


def test_open_files() -> None:
    assert judge_open_files(1024, 1_048_576, processes=8).state is State.OK
    assert judge_open_files(1024, resource.RLIM_INFINITY, processes=8).state is State.OK
    low = judge_open_files(1024, 1024, processes=8)
    assert low.state is State.WARNING and "below 4096" in low.evidence
    tiny = judge_open_files(60, 60, processes=2)
    assert tiny.state is State.PROBLEM and "need about 64" in tiny.evidence  # 52 + 2 * 6


@pytest.mark.slow
def test_a_tiny_ulimit_is_seen_by_the_doctor(tmp_path: Path) -> None:
    command = f"ulimit -n 60; exec {sys.executable} -m hydraflow.doctor --json trainer.device=cpu"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HYDRAFLOW_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    rows = {row["check"]: row for row in json.loads(done.stdout)}
    assert rows["open files"]["state"] == "problem"
    assert "60, can be raised to 60" in rows["open files"]["evidence"]


def test_temporary_files_of_a_local_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path without room for sockets, and a folder in the place of the user's own; neither matters in a
    cluster that is joined."""
    config = load("ppo", PPOConfig)
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    with pytest.raises(ConfigError, match="is too long for the sockets below it"):
        list(check_temporary_files(CheckContext(config)))
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="h") as short:
        monkeypatch.setenv("RAY_TMPDIR", short)
        Path(short, f"hydraflow-{os.getuid()}").touch()
        found = list(check_temporary_files(CheckContext(config)))
        assert found[-1].state is State.PROBLEM and short in found[-1].evidence
        config.ray_init.address = "auto"
        assert all(one.state is not State.PROBLEM for one in check_temporary_files(CheckContext(config)))


def test_temporary_files(tmp_path: Path) -> None:
    assert judge_temporary_files(tmp_path, full=1.1).state is State.OK
    full = judge_temporary_files(tmp_path, full=0.0)
    assert full.state is State.WARNING and "RAY_TMPDIR" in full.remedy
    assert judge_temporary_files(tmp_path / "none").state is State.PROBLEM


def machine(processes: int, threads: int) -> Machine:
    return Machine("cpu", 1, processes, threads)


def test_processes_that_fit() -> None:
    found = judge_processors({"affinity mask": 8, "cgroup quota": 4.0}, machine(2, 2), ray_cpus=None)
    assert found.state is State.OK
    assert "4 cores by cgroup quota (affinity mask 8, cgroup quota 4)" in found.evidence


def test_threads_beyond_the_quota() -> None:
    found = judge_processors({"affinity mask": 64, "SLURM_CPUS_PER_TASK": 4.0}, machine(2, 8), ray_cpus=None)
    assert found.state is State.WARNING
    assert found.remedy == "trainer.threads_per_process=2"


def test_processes_beyond_the_cores_take_turns() -> None:
    found = judge_processors({"affinity mask": 2}, machine(8, 1), ray_cpus=None)
    assert found.state is State.NOTE and "take turns" in found.evidence


def test_ray_must_not_count_more_than_there_are() -> None:
    found = judge_processors({"affinity mask": 64, "cgroup quota": 2.5}, machine(2, 1), ray_cpus=64)
    assert (found.state, found.remedy) == (State.WARNING, "ray_init.num_cpus=2")
