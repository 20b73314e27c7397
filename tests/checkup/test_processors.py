"""Cores against processes and threads: numbers a reader can count."""

from __future__ import annotations

from hydraflow.checkup.finding import State
from hydraflow.checkup.limits import judge_processors
from hydraflow.trainer.machine import Machine


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
