"""Where the roles run changes no number, and the run does what the plan's picture says: facts are what the
processes report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs.command import SMALL_RECIPE, SMALL_STEPS, read_steps
from jobs.dying import dying_worker

from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.compose.loading import load
from hydraflow.dispatch.runtime import Runtime
from hydraflow.errors import ConfigError
from hydraflow.jobs.ppo import PPOJob
from hydraflow.schema import PPOConfig
from hydraflow.trainer import roles
from hydraflow.trainer.source import TrajectorySource
from hydraflow.trainer.weight_links import ObjectStore

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session")]

ACTOR, ROLLOUT = "actor_rollout_ref.actor.device_mapping", "actor_rollout_ref.rollout.device_mapping"
REF, CRITIC = "actor_rollout_ref.ref.device_mapping", "critic.device_mapping"
GPUS = "trainer.n_gpus_per_node"
ELSEWHERE = [f"{GPUS}=4", f"{ACTOR}=[0,1]", f"{CRITIC}=[0,1]", f"{ROLLOUT}=[2,3]"]
OVERLAPPING = [f"{GPUS}=3", f"{ACTOR}=[0,1]", f"{CRITIC}=[1,2]", f"{REF}=[1,2]", f"{ROLLOUT}=[1,2]"]
NOT_COMPARED = ("timing_s/", "perf/")
SMALL_BUCKETS = [
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes=1",
    "actor_rollout_ref.rollout.verify_weights_every=1",
]


class WatchedJob(PPOJob):
    """Notes which process each role has on each device, and beside whom the rollout slept."""

    beside: list[Sequence[str]]

    def source(self, plan: BatchPlan, runtime: Runtime, *others: Any) -> TrajectorySource:
        self.plan, self.pids = plan, {}
        for group in runtime.groups:
            pids = [group.processes[rank].pid for rank in range(group.world_size)]
            self.pids |= dict.fromkeys(group.roles, pids)
        return super().source(plan, runtime, *others)


def train(folder: Path, cache: Path, *overrides: str) -> tuple[WatchedJob, list[dict[str, float]]]:
    given = [
        *SMALL_RECIPE,
        *SMALL_STEPS,
        f"recipe.cache_dir={cache}",
        f"trainer.default_local_dir={folder}",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "trainer.total_training_steps=2",
        "trainer.threads_per_process=1",
        "trainer.val_before_train=false",
        "trainer.test_freq=2",
        "trainer.save_final_model=false",
        "trainer.logger=[file]",
        "data.val_max_samples=4",
    ]
    job = WatchedJob(load("ppo", PPOConfig, [*given, *overrides]))
    job.beside = []

    class Link(ObjectStore):
        def sampled(self) -> None:
            job.beside.append(self.beside)
            super().sampled()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(roles, "ObjectStore", Link)
        job.run()
    compared = [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(NOT_COMPARED) and "seconds" not in name
        }
        for row in read_steps(folder)
    ]
    return job, compared


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory, recipe_cache: Path) -> list[dict[str, float]]:
    return train(tmp_path_factory.mktemp("fused"), recipe_cache, f"{GPUS}=2")[1]


@pytest.fixture(scope="module")
def apart(
    tmp_path_factory: pytest.TempPathFactory, recipe_cache: Path
) -> tuple[Path, WatchedJob, list[dict[str, float]]]:
    """A run with processes of its own for every role, and a checkpoint of its first step."""
    folder = tmp_path_factory.mktemp("apart")
    saved = ["trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2", "trainer.max_critic_ckpt_to_keep=2"]
    return folder, *train(
        folder, recipe_cache, f"{GPUS}=2", "trainer.fuse_roles=false", *SMALL_BUCKETS, *saved
    )


def processes(job: WatchedJob) -> dict[str, dict[int, int]]:
    """Role -> device -> process id. The processes that compute advantages are the actor's."""
    assert job.pids["advantage"] == job.pids["actor"]
    return {
        role: dict(zip(layout.devices.listed(), job.pids[role], strict=True))
        for role, layout in job.plan.layouts.items()
    }


def test_roles_apart_share_no_process_and_change_no_number(fused: Any, apart: Any) -> None:
    _, job, rows = apart
    assert rows == fused and len(rows) == 2
    found = [pid for on_devices in processes(job).values() for pid in on_devices.values()]
    assert len(set(found)) == len(found) == 8
    slept = [set(beside) for beside in job.beside]
    assert slept == [{"actor", "critic", "ref"}] * 2


def test_roles_share_processes_where_they_have_the_same_devices(
    fused: Any, tmp_path: Path, recipe_cache: Path
) -> None:
    job, rows = train(tmp_path, recipe_cache, *OVERLAPPING)
    assert rows == fused
    on_device = processes(job)
    for role, found in on_device.items():
        for other, others in on_device.items():
            shared = set(found.values()) & set(others.values())
            assert shared == (set(found.values()) if set(found) == set(others) else set()), (role, other)


def test_a_checkpoint_of_one_placement_resumes_in_another(
    fused: Any, apart: Any, tmp_path: Path, recipe_cache: Path
) -> None:
    resumed = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={apart[0]}/global_step_1"]
    job, rows = train(tmp_path, recipe_cache, *ELSEWHERE, *resumed)
    assert rows == fused[1:]
    assert job.beside == [[]], "nobody else is on its devices, so it never sleeps"


def test_generation_processes_that_die_are_replaced_and_change_no_number(
    fused: Any,
    tmp_path: Path,
    recipe_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What the first sampled is still read after its death."""
    deaths = {"idle": 1, "receiving": 1, "sampling": 2}
    monkeypatch.setattr(roles, "RolloutWorker", dying_worker(deaths, tmp_path))
    _, rows = train(tmp_path / "run", recipe_cache, *ELSEWHERE, *SMALL_BUCKETS)
    assert rows == fused
    assert len(list(tmp_path.glob("died *"))) == 4
    said = [record.getMessage() for record in caplog.records if "is started again" in record.getMessage()]
    assert len(said) == 4 and all(text.startswith("rollout rank 0 on node ") for text in said)


def test_machines_of_its_own_for_the_rollout_need_a_cluster_with_as_many(
    tmp_path: Path, recipe_cache: Path
) -> None:
    own = ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=2"]
    with pytest.raises(ConfigError, match="needs 2 nodes, the cluster has 1\n.*no machines of the rollout"):
        train(tmp_path, recipe_cache, f"{GPUS}=2", *own)
