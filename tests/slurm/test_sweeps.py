"""Sweeps up to their submission to a real Slurm: our own arrays, and Hydra's launcher."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from jobs.command import SMALL_RECIPE, SMALL_STEPS
from slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(300)


def tasks(cluster: Cluster, name: str) -> set[str]:
    """Numbers in the array of that name."""
    return set(cluster.ask("squeue", "--array", "--noheader", f"--name={name}", "--format=%K").split())


def test_a_sweep_is_an_array_with_a_job_for_each_combination(cluster: Cluster, home: Path) -> None:
    words = ["--multirun", "--nodes", "2", "--cpus-per-task", "4", "--job-name", "sweep", "--sbatch=--hold", "--"]
    done = cluster.hydraflow("slurm", "submit", *words, *SMALL_RECIPE, *SMALL_STEPS, "trainer.seed=1,2,3", home=home)
    assert done.returncode == 0, done.stderr
    number = re.findall(r"array (\d+) submitted", done.stdout)[0]
    try:
        assert tasks(cluster, "sweep") == {"0", "1", "2"}
        script = cluster.ask("scontrol", "write", "batch_script", number, "-")
        assert [f"    {task}) ARGUMENTS=(" in script and f"trainer.seed={task + 1}" in script for task in range(3)] == [True] * 3
    finally:
        cluster.ask("scancel", number)


@pytest.mark.skipif(find_spec("submitit") is None, reason="needs hydra-submitit-launcher (pip install -e '.[slurm]')")
def test_hydras_launcher_submits_the_sweep(cluster: Cluster, home: Path) -> None:
    launcher = ["hydra/launcher=submitit_slurm", "hydra.launcher.name=submitit-sweep", "hydra.launcher.cpus_per_task=2"]
    launcher += ["hydra.launcher.timeout_min=5", "+hydra.launcher.additional_parameters.hold=true"]
    command = [sys.executable, "-m", "hydraflow.main_ppo", "--multirun", *launcher, *SMALL_RECIPE, *SMALL_STEPS, "trainer.seed=1,2"]
    with open(home / "log", "w") as log:
        process = subprocess.Popen(command, cwd=home, env=cluster.environ, stdout=log, stderr=log, start_new_session=True)
    try:
        said = (home / "log").read_text
        cluster.wait_for(
            lambda: len(tasks(cluster, "submitit-sweep")) == 2 or process.poll() is not None, 120, "two jobs in the queue", said
        )
        assert tasks(cluster, "submitit-sweep") == {"0", "1"}, said()
        scripts = list((home / "multirun").rglob("*_submission.sh"))
        assert scripts and "#SBATCH --array=0-1" in scripts[0].read_text()
    finally:
        cluster.ask("scancel", "--name=submitit-sweep")
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
