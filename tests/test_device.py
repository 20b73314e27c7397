"""How many cores and GPUs a process may use, read from files laid out as the kernel does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hydraflow import device
from hydraflow.device import (
    cgroup_folders,
    core_limits,
    in_fixed_order,
    keep_freed_memory,
    listed_gpus,
    peak_flops,
    usable_cores,
)

ALLOWED = float(len(os.sched_getaffinity(0)))


def membership(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "membership"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def limits(cgroups: Path, *lines: str) -> dict[str, float]:
    """Of a process in these groups."""
    return core_limits(cgroups=cgroups, membership=membership(cgroups, *lines), environ={})


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_quota_of_version_2(tmp_path: Path) -> None:
    write(tmp_path / "cpu.max", "150000 100000\n")
    assert limits(tmp_path, "0::/") == {"affinity mask": ALLOWED, "cgroup quota": 1.5}


def test_no_quota(tmp_path: Path) -> None:
    write(tmp_path / "cpu.max", "max 100000\n")
    assert limits(tmp_path, "0::/") == {"affinity mask": ALLOWED}


def test_the_tightest_quota_on_the_way_to_the_root_holds(tmp_path: Path) -> None:
    write(tmp_path / "cpu.max", "max 100000")
    write(tmp_path / "job" / "cpu.max", "300000 100000")
    write(tmp_path / "job" / "step" / "cpu.max", "800000 100000")
    assert limits(tmp_path, "0::/job/step")["cgroup quota"] == 3.0


def test_a_quota_of_version_1(tmp_path: Path) -> None:
    write(tmp_path / "cpu,cpuacct" / "job" / "cpu.cfs_quota_us", "250000\n")
    write(tmp_path / "cpu,cpuacct" / "job" / "cpu.cfs_period_us", "100000\n")
    assert limits(tmp_path, "4:memory:/other", "3:cpu,cpuacct:/job")["cgroup quota"] == 2.5


def test_version_1_without_a_quota(tmp_path: Path) -> None:
    write(tmp_path / "cpu" / "cpu.cfs_quota_us", "-1\n")
    write(tmp_path / "cpu" / "cpu.cfs_period_us", "100000\n")
    assert "cgroup quota" not in limits(tmp_path, "1:cpu:/")


def test_the_host_s_path_is_not_mounted_in_a_container(tmp_path: Path) -> None:
    write(tmp_path / "cpu" / "cpu.cfs_quota_us", "200000")
    write(tmp_path / "cpu" / "cpu.cfs_period_us", "100000")
    assert limits(tmp_path, "3:cpu:/docker/0123")["cgroup quota"] == 2.0


def test_slurm_counts_and_nonsense_does_not(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert (
        core_limits(cgroups=gone, membership=gone, environ={"SLURM_CPUS_PER_TASK": "1"})[
            "SLURM_CPUS_PER_TASK"
        ]
        == 1.0
    )
    assert "SLURM_CPUS_PER_TASK" not in core_limits(
        cgroups=gone, membership=gone, environ={"SLURM_CPUS_PER_TASK": "many"}
    )


def test_folders_of_a_controller_stay_below_the_mount(tmp_path: Path) -> None:
    found = cgroup_folders("memory", tmp_path, membership(tmp_path, "4:memory:/a/b", "1:cpu:/c"))
    assert found == [tmp_path, tmp_path / "memory", tmp_path / "memory/a/b", tmp_path / "memory/a"]


def test_this_process_may_use_a_core() -> None:
    assert 1 <= usable_cores() <= ALLOWED


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 2),
        ("0", 1),
        ("", 0),
        ("0,1,2,3", 2),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("1,-1,0", 1),
        ("5", 0),
        ("0,5,1", 1),
        ("GPU-5f, MIG-1/2", 2),
    ],
)
def test_gpus_are_counted_without_torch(tmp_path: Path, visible: str | None, count: int) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert listed_gpus(tmp_path, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == count
    assert listed_gpus(tmp_path / "none", {}) == 0


def test_the_peak_of_a_cpu_is_measured_once() -> None:
    peak = peak_flops(torch.device("cpu"), torch.float32)
    assert peak is not None and 1e8 < peak < 1e14
    assert peak_flops(torch.device("cpu"), torch.float32) == peak


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA L40S", torch.float16, 362),
        ("NVIDIA A100-SXM4-80GB", torch.float32, None),
        ("a GPU of next year", torch.bfloat16, None),
    ],
)
def test_the_peak_of_a_gpu_is_that_of_its_data_sheet(
    name: str, dtype: torch.dtype, teraflops: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "gpu_name", lambda index: name)
    peak_flops.cache_clear()
    found = peak_flops(torch.device("cuda", 0), dtype)
    peak_flops.cache_clear()
    assert found == (None if teraflops is None else teraflops * 1e12)


FAULTS = """
import resource, sys
import torch
from hydraflow.device import keep_freed_memory, return_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def used():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

if "keep" in sys.argv:
    keep_freed_memory("cpu")
for _ in range(10):
    torch.ones(2**24)
before = faults()
for _ in range(10):
    torch.ones(2**24)
print(faults() - before)
kept = used()
return_memory("cpu")
print(kept - used())
"""


@pytest.mark.parametrize("words", [["keep"], []])
def test_freed_memory_is_kept_until_it_is_returned(words: list[str]) -> None:
    """Ten tensors of 64 MiB, one after the other; by default each of their pages is a new one."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", FAULTS, *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    faults, returned = map(int, done.stdout.split())
    assert (faults < 100) == bool(words)
    assert (returned > 2**25) == bool(words)


def test_who_sets_the_allocator_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", None)
    keep_freed_memory("cpu", {"MALLOC_ARENA_MAX": "1"})
    keep_freed_memory("cuda", {})


@pytest.mark.parametrize("before", [False, True])
def test_the_order_of_sums_is_fixed_in_the_body_only(before: bool) -> None:
    enabled = torch.are_deterministic_algorithms_enabled
    torch.use_deterministic_algorithms(before, warn_only=before)
    try:
        with pytest.raises(ZeroDivisionError), in_fixed_order():
            assert enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
            raise ZeroDivisionError
        assert enabled() == before == torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
