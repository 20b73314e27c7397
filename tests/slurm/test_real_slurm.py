"""Runs on a real Slurm of two nodes: training over both, several jobs at once, pre-emption, a lost node;
sweeps up to the submission.

One file, since one process of a test run has the cluster. While a job waits to be started again, another one
runs.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from jobs.command import SMALL_RECIPE, processes_with, read_steps
from safetensors.torch import load_file
from slurm.cluster import Cluster, Job

from hydraflow.compose.loading import load
from hydraflow.jobs.ppo import PPOJob
from hydraflow.schema import PPOConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]  # the first took 1,110 s on a slow machine
STEPS = 18
LONG = 420.0
ROLLOUT_APART = [f"actor_rollout_ref.rollout.{size}=1" for size in ("nnodes", "n_gpus_per_node")]
APART_STEPS = 5
REWARD = """
import time

CALLS = []

def compute_score(data_source, solution_str, ground_truth, extra_info):
    CALLS.append(solution_str)
    assert len(CALLS) <= {most}
    time.sleep({seconds})
    return sum(said == right for said, right in zip(solution_str, ground_truth)) / len(ground_truth)
"""
"""Share of right digits: a model that has hardly been warmed up is never right as a whole."""


def arguments(cluster: Cluster, *more: str, ranks: int = 1) -> list[str]:
    """The default recipe, small; one process on each of the trainer's nodes, or several."""
    return ["--", *overrides(cluster.cache), f"trainer.n_gpus_per_node={ranks}", *more]


def overrides(cache: Path) -> list[str]:
    fixed = [
        f"recipe.cache_dir={cache}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=3",
        "trainer.test_freq=-1",
        "trainer.rpc_timeout=100",  # whatever hangs is named, with the stacks of all workers
        "trainer.threads_per_process=1",  # sums of several threads are rounded differently on some processors
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
    ]
    return [*SMALL_RECIPE, *fixed]


def with_reward(home: Path, name: str, calls: int = 10**6, seconds: float = 0.0) -> str:
    """A reward function that fails after some calls, each of which takes some seconds."""
    (home / f"{name}.py").write_text(REWARD.format(most=calls, seconds=seconds))
    return f"reward.custom_reward_function.path={home}/{name}.py"


def numbers(folder: Path) -> list[dict[str, float]]:
    """What a run logged, without what depends on the clock."""
    clock = re.compile(r"timing_s/|perf/|seconds$|training/restarts$")
    return [
        {key: value for key, value in line.items() if not clock.match(key)} for line in read_steps(folder)
    ]


def differing(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> list[str]:
    """What differs, each with its step."""
    return [
        f"step {step}, {key}: {one.get(key)}, {other.get(key)}"
        for step, (one, other) in enumerate(zip(ours, theirs, strict=True))
        for key in sorted(one.keys() | other.keys())
        if one.get(key) != other.get(key)
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final_model" / "actor" / "model.safetensors")


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Two jobs, for some time at once on the same nodes:

    killed  was killed while it started, then asked to stop; now it is held
    other   trains on the one node and samples on the other; it fails by itself
    """
    home = tmp_path_factory.mktemp("jobs")
    paced = with_reward(home, "killed", seconds=1 / 32)  # a second for each step, of 32 rows
    job = cluster.submit(*arguments(cluster, paced), home=home, name="killed")
    cluster.wait_for(lambda: "nodes have joined Ray" in job.said(), 120, "Ray on both nodes", job.account)
    cluster.ask("scontrol", "requeue", job.number)  # at once, without a word to the training
    job.await_state("PENDING", seconds=180)
    job.await_step(1, LONG)  # the recipe is made
    fails = with_reward(home, "other", 32 * (1 + APART_STEPS))  # also the validation has 32 rows
    apart = arguments(cluster, *ROLLOUT_APART, fails, ranks=2)
    other = cluster.submit(*apart, home=home, name="other")
    other.await_state("RUNNING", seconds=60)
    job.await_step(3)
    # --signal=B:USR1@120 sends the same ahead of the limit.
    cluster.ask("scancel", "--signal=USR1", "--batch", job.number)
    job.await_state("PENDING", seconds=180)
    cluster.ask("scontrol", "hold", job.number)
    assert "it was asked to stop, and saved; requeuing, restart 2" in job.said()
    assert max(job.steps()) < STEPS - 8, "it was too fast for this test"
    return {"killed": job, "other": other}


@pytest.fixture(scope="module")
def failed(jobs: dict[str, Job]) -> Job:
    """The other job, which failed by itself."""
    job = jobs["other"]
    assert job.await_state("FAILED", "COMPLETED", "PENDING", seconds=LONG) == "FAILED", job.said()[-4000:]
    return job


@pytest.fixture(scope="module")
def whole(
    cluster: Cluster, jobs: dict[str, Job], ray_session: None, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a run that nothing stopped, on two processes of this machine, without Slurm."""
    home = tmp_path_factory.mktemp("whole")
    here = ["trainer.n_gpus_per_node=2", with_reward(home, "whole"), f"trainer.default_local_dir={home}/run"]
    PPOJob(load("ppo", PPOConfig, [*overrides(cluster.cache), *here])).run()
    return home / "run"


@pytest.fixture(scope="module")
def completed(cluster: Cluster, jobs: dict[str, Job], failed: Job, whole: Path) -> Job:
    """The job that was killed and asked to stop has lost a node, too, and then come to its end. The other one
    has ended before: it does not lose the node."""
    killed = jobs["killed"]
    saved = max(killed.steps())
    cluster.ask("scontrol", "release", killed.number)
    killed.await_step(saved + 4)
    assert f"continues after step {saved} of {STEPS}" in killed.said()
    # What Ray's processes say while Slurm kills them is theirs: the next run's words are ours.
    without_node2(cluster, killed, since=killed.said().rindex("continues after step"))
    assert killed.await_state("COMPLETED", "FAILED", seconds=LONG) == "COMPLETED", killed.said()[-4000:]
    return killed


def test_a_job_that_was_killed_then_asked_to_stop_then_lost_a_node_ends_with_the_numbers_of_one_machine(
    completed: Job, whole: Path
) -> None:
    assert completed.fact("Restarts") == "3"
    assert len(re.findall(rf"continues after step [1-9]\d* of {STEPS}", completed.said())) == 2
    assert [line["step"] for line in read_steps(completed.folder)] == list(range(STEPS + 1))
    assert all(line["actor/grad_norm"] > 0 for line in read_steps(whole)[1:])
    assert differing(numbers(completed.folder), numbers(whole)) == []
    mine, theirs = weights(completed.folder), weights(whole)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_the_default_recipe_trains_over_two_nodes(completed: Job) -> None:
    assert "all 2 nodes have joined Ray: node1, node2" in completed.said()
    assert re.search(r"trainer: machines +2 machines +follows", completed.said())
    assert "SLURM_JOB_NUM_NODES=2" in completed.said()
    shards = completed.folder / f"global_step_{STEPS}" / "actor" / "dcp"
    assert {"__0_0.distcp", "__1_0.distcp"} <= {file.name for file in shards.iterdir()}, (
        "each node wrote its half"
    )
    assert "ended with 0" in completed.said()


def test_the_rollout_may_have_a_node_of_its_own_and_changes_no_number(failed: Job, whole: Path) -> None:
    assert re.search(r"trainer: machines +1 machine +follows", failed.said())
    assert re.search(r"rollout: machines +1 machine", failed.said())
    found = numbers(failed.folder)
    assert len(found) == 1 + APART_STEPS
    assert differing(found, numbers(whole)[: len(found)]) == []


def test_the_jobs_folder_is_the_users_alone_and_its_token_is_gone(completed: Job) -> None:
    folder = completed.home / "runs" / "slurm" / f"job-{completed.number}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not (folder / "token").exists()


def test_no_process_of_a_job_outlives_it(completed: Job, failed: Job) -> None:
    for job in (completed, failed):
        assert not processes_with([f"/tmp/hydraflow-0/{job.number}/"]), f"Ray of {job.name} is still there"


def test_two_jobs_on_the_same_nodes_took_ports_of_their_own(completed: Job, failed: Job) -> None:
    files = sorted((completed.home / "runs" / "slurm").glob("job-*/address"))
    assert len(files) == 2 and len({file.read_text() for file in files}) == 2


def test_a_run_that_fails_by_itself_hands_its_exit_code_on_and_is_not_put_back(failed: Job) -> None:
    assert (failed.fact("ExitCode"), failed.fact("Restarts")) == ("5:0", "0")
    assert "all 2 nodes have joined Ray" in failed.said() and "ended with 5" in failed.said()
    assert "the reward function failed on" in failed.said()


def without_node2(cluster: Cluster, job: Job, since: int) -> None:
    """The node is lost, the run that speaks from character `since` on ends, the job is put back, the node is
    there again."""
    at = time.monotonic()
    cluster.script("lose", "2")
    try:
        cluster.wait_for(lambda: "] lost: node2." in job.said(), 150, "the message", job.account)
        print(f"a lost node is reported after {time.monotonic() - at:.0f} s")
        assert re.search(
            r"^\w+ rank [01] on node node2 failed in \w+: the process died", job.said(), re.MULTILINE
        ), job.said()[-4000:]
        cluster.wait_for(
            lambda: "a node was lost; requeuing" in job.said(),
            120,
            "the job to be put back",
            job.account,
        )
        assert job.await_state("PENDING", "COMPLETING", seconds=120)
        assert "Traceback" not in job.said()[since:]
    finally:
        # Slurm resends what the lost node missed when the node is back: "kill job N" would hit the job's next
        # start. On real machines it has done so long before a node has booted.
        cluster.ask("scontrol", "hold", job.number)
        held = job.fact("Priority")
        cluster.script("start", "2")
        cluster.wait_for(cluster.at_rest, 300, "Slurm to have nothing left to say to a node", job.account)
        cluster.ask("scontrol", "release", job.number)
    assert held == "0", "the job was not held"


def test_a_job_for_more_nodes_than_there_are_is_refused(cluster: Cluster, home: Path) -> None:
    words = ["slurm", "submit", "--nodes", "4", "--job-name", "refused", *arguments(cluster)]
    done = cluster.hydraflow(*words, home=home)
    assert done.returncode == 2
    assert "--nodes 4: partition main has 2 nodes" in done.stderr and "-> --nodes 2" in done.stderr
    assert not cluster.ask("squeue", "--noheader", "--name", "refused").strip()


def test_a_run_that_contradicts_the_allocation_is_refused_on_the_nodes_too(
    cluster: Cluster, home: Path
) -> None:
    """The file was edited after it was made: the job itself looks again, before Ray starts."""
    done = cluster.hydraflow(
        "slurm", "submit", "--nodes", "2", "--cpus-per-task", "4", "--dry-run", *arguments(cluster), home=home
    )
    script = home / "edited.sbatch"
    script.write_text(
        done.stdout.replace("ARGUMENTS=(", "ARGUMENTS=(\n    trainer.nnodes=3").replace(
            "runs/slurm/%x-%j.log", "log"
        )
    )
    number = cluster.ask("sbatch", "--parsable", f"--chdir={home}", str(script)).strip()
    job = Job(cluster, number, home, "edited")
    assert job.await_state("FAILED", "COMPLETED", seconds=90) == "FAILED"
    assert job.fact("ExitCode") == "2:0"
    said = (home / "log").read_text()
    assert f"trainer.nnodes=3: Slurm gave job {number} 2 nodes (SLURM_JOB_NUM_NODES=2)" in said
    assert "joined Ray" not in said


def tasks(cluster: Cluster, name: str) -> set[str]:
    """Numbers in the array of that name."""
    return set(cluster.ask("squeue", "--array", "--noheader", f"--name={name}", "--format=%K").split())


def test_a_sweep_is_an_array_with_a_job_for_each_combination(cluster: Cluster, home: Path) -> None:
    words = [
        "--multirun",
        "--nodes",
        "2",
        "--cpus-per-task",
        "4",
        "--job-name",
        "sweep",
        "--sbatch=--hold",
        "--",
    ]
    done = cluster.hydraflow("slurm", "submit", *words, *SMALL_RECIPE, "trainer.seed=1,2,3", home=home)
    assert done.returncode == 0, done.stderr
    number = re.findall(r"array (\d+) submitted", done.stdout)[0]
    try:
        assert tasks(cluster, "sweep") == {"0", "1", "2"}
        script = cluster.ask("scontrol", "write", "batch_script", number, "-")
        assert [
            f"    {task}) ARGUMENTS=(" in script and f"trainer.seed={task + 1}" in script for task in range(3)
        ] == [True] * 3
    finally:
        cluster.ask("scancel", number)


@pytest.mark.skipif(
    find_spec("submitit") is None, reason="needs hydra-submitit-launcher (pip install -e '.[slurm]')"
)
def test_hydras_launcher_submits_the_sweep(cluster: Cluster, home: Path) -> None:
    launcher = [
        "hydra/launcher=submitit_slurm",
        "hydra.launcher.name=submitit-sweep",
        "hydra.launcher.cpus_per_task=2",
    ]
    launcher += ["hydra.launcher.timeout_min=5", "+hydra.launcher.additional_parameters.hold=true"]
    command = [
        sys.executable,
        "-m",
        "hydraflow.main_ppo",
        "--multirun",
        *launcher,
        *SMALL_RECIPE,
        "trainer.seed=1,2",
    ]
    with open(home / "log", "w") as log:
        process = subprocess.Popen(
            command, cwd=home, env=cluster.environ, stdout=log, stderr=log, start_new_session=True
        )
    try:
        said = (home / "log").read_text
        cluster.wait_for(
            lambda: len(tasks(cluster, "submitit-sweep")) == 2 or process.poll() is not None,
            120,
            "two jobs in the queue",
            said,
        )
        assert tasks(cluster, "submitit-sweep") == {"0", "1"}, said()
        scripts = list((home / "multirun").rglob("*_submission.sh"))
        assert scripts and "#SBATCH --array=0-1" in scripts[0].read_text()
    finally:
        cluster.ask("scancel", "--name=submitit-sweep")
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
