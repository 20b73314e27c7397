"""Shared memory, open files, temporary files: judged by numbers, and by a real limit in a process of its own."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from hydraflow.checkup.finding import State
from hydraflow.checkup.limits import judge_open_files, judge_shared_memory, judge_temporary_files, object_store_bytes


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
    assert found.state is State.WARNING and "wants 3.00 GiB" in found.evidence
    assert found.remedy.startswith("docker run --shm-size=4g")


def test_open_files() -> None:
    assert judge_open_files(1024, 1_048_576, processes=8).state is State.OK
    assert judge_open_files(1024, resource.RLIM_INFINITY, processes=8).state is State.OK
    low = judge_open_files(1024, 1024, processes=8)
    assert low.state is State.WARNING and "below 4096" in low.evidence
    tiny = judge_open_files(60, 60, processes=2)
    assert tiny.state is State.PROBLEM and "need about 64" in tiny.evidence  # 52 + 2 * 6


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


def test_temporary_files(tmp_path: Path) -> None:
    assert judge_temporary_files(tmp_path, full=1.1).state is State.OK
    full = judge_temporary_files(tmp_path, full=0.0)
    assert full.state is State.WARNING and "RAY_TMPDIR" in full.remedy
    assert judge_temporary_files(tmp_path / "none").state is State.PROBLEM
