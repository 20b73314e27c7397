"""Where the roles run changes no number, and the run does what the plan's picture says: facts are what the
processes report. docs/placement.md has the table of placements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from jobs.command import SMALL_RECIPE, STEPS_ALONE, read_numbers, read_steps
from jobs.dying import dying_worker
from jobs.frank import FrankHost
from jobs.turning import noting_workers
from safetensors.torch import load_file, save_file
from source_tree import ROOT
from transformers import AutoModelForSequenceClassification

from hydraflow.batch_plan.layout import Devices
from hydraflow.batch_plan.resolve import BatchPlan, resolve_plan
from hydraflow.compose.loading import load
from hydraflow.dispatch import group as dispatch_group
from hydraflow.dispatch.runtime import Runtime
from hydraflow.errors import ConfigError
from hydraflow.explain.picture import picture
from hydraflow.jobs.ppo import PPOJob
from hydraflow.models.tiny import make_model
from hydraflow.schema import PPOConfig
from hydraflow.trainer import roles
from hydraflow.trainer.recorded import read_dump
from hydraflow.trainer.source import TrajectorySource
from hydraflow.trainer.weight_links import SharedMemory

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session")]
PPO = ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"]
"""With a critic and a reference."""
GRPO = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=true"]
"""With a reference."""

ACTOR, ROLLOUT = "actor_rollout_ref.actor.device_mapping", "actor_rollout_ref.rollout.device_mapping"
REF, CRITIC = "actor_rollout_ref.ref.device_mapping", "critic.device_mapping"
GPUS = "trainer.n_gpus_per_node"
ELSEWHERE = [f"{GPUS}=4", f"{ACTOR}=[0,1]", f"{CRITIC}=[0,1]", f"{ROLLOUT}=[2,3]"]
ONE_OF_TWO = [f"{GPUS}=2", f"{ROLLOUT}=[1]"]
REFERENCE_APART = [f"{GPUS}=4", f"{ACTOR}=[0,1]", f"{ROLLOUT}=[0,1]", f"{REF}=[2,3]"]
OF_THREE = [f"{GPUS}=3", f"{ACTOR}=0-1", f"{REF}=0-1", f"{ROLLOUT}=1-2"]
CRITIC_OF_THREE = [f"{CRITIC}=[0]"]
OVERLAPPING = [f"{GPUS}=3", f"{ACTOR}=[0,1]", f"{CRITIC}=[1,2]", f"{REF}=[1,2]", f"{ROLLOUT}=[1,2]"]
SMALL_BUCKETS = ["actor_rollout_ref.rollout.update_weights_bucket_megabytes=1"]


class WatchedJob(PPOJob):
    """Notes which process each role has on each device, and beside whom the rollout slept."""

    beside: list[Sequence[str]]

    def source(self, plan: BatchPlan, runtime: Runtime, *others: Any) -> TrajectorySource:
        self.plan, self.on_devices = plan, {}
        for group in runtime.groups:
            for pid, names, device in ray.get([host.facts.remote() for host in group._hosts]):
                for role in names:
                    self.on_devices.setdefault(role, {})[device] = pid
        return super().source(plan, runtime, *others)


def train(
    folder: Path, cache: Path, *overrides: str, algorithm: Sequence[str] = PPO
) -> tuple[WatchedJob, list[dict[str, float]]]:
    given = [
        *SMALL_RECIPE,
        f"recipe.cache_dir={cache}",
        f"trainer.default_local_dir={folder}",
        *algorithm,
        "actor_rollout_ref.rollout.verify_weights_every=1",
        "trainer.total_training_steps=2",
        "trainer.threads_per_process=1",
        *STEPS_ALONE,
        "trainer.test_freq=2",
        "data.val_max_samples=4",
    ]
    job = WatchedJob(load("ppo", PPOConfig, [*given, *overrides]))
    job.beside = []

    class Link(SharedMemory):
        def sleep(self) -> None:
            job.beside.append(self.turns.beside("rollout"))
            super().sleep()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(roles, "SharedMemory", Link)
        patched.setattr(dispatch_group, "WorkerHost", FrankHost)
        job.run()
    return job, read_numbers(folder)


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


def as_planned(job: WatchedJob) -> dict[str, dict[int, int]]:
    """Role -> device -> process id, by what the processes say; their picture is the plan's. The processes
    that compute advantages are the actor's."""
    found, plan = job.on_devices, job.plan
    assert found["advantage"] == found["actor"]
    facts = {
        role: replace(layout, devices=Devices.of(range(device, device + 1) for device in found[role]))
        for role, layout in plan.layouts.items()
    }
    assert picture(facts, plan.cluster) == picture(plan.layouts, plan.cluster)
    return {role: found[role] for role in plan.layouts}


def test_the_pictures_in_the_documentation_are_those_of_the_plans() -> None:
    shown = []
    for overrides in (ELSEWHERE, ONE_OF_TWO, [*OF_THREE, *CRITIC_OF_THREE]):
        config = load("ppo", PPOConfig, [*SMALL_RECIPE, *PPO, *overrides])
        plan = resolve_plan(config, prompts=600, devices_per_node=6)
        shown.append("\n".join([plan.placement, *picture(plan.layouts, plan.cluster)]))
    page = (ROOT / "docs" / "placement.md").read_text()
    assert "```text\n" + "\n\n".join(shown) + "\n```\n" in page


def test_roles_apart_share_no_process_and_change_no_number(fused: Any, apart: Any) -> None:
    _, job, rows = apart
    assert rows == fused and len(rows) == 2
    found = [pid for on_devices in as_planned(job).values() for pid in on_devices.values()]
    assert len(set(found)) == len(found) == 8
    slept = [set(beside) for beside in job.beside]
    assert slept == [{"actor", "critic", "ref"}] * 4, "in each step, and while its checkpoint is saved"


def test_roles_share_processes_where_they_have_the_same_devices(
    fused: Any, tmp_path: Path, recipe_cache: Path
) -> None:
    job, rows = train(tmp_path, recipe_cache, *OVERLAPPING)
    assert rows == fused
    on_device = as_planned(job)
    for role, found in on_device.items():
        for other, others in on_device.items():
            shared = set(found.values()) & set(others.values())
            assert shared == (set(found.values()) if set(found) == set(others) else set()), (role, other)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A reward model, and a step between two validations of two calls each."""
    folder = make_model(
        tmp_path_factory.mktemp("judge") / "model", hidden=32, layers=1, heads=2, kv_heads=1, seed=3
    )
    score = torch.randn(1, 32, generator=torch.Generator().manual_seed(1))
    weights = load_file(folder / "model.safetensors") | {"score.weight": score}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    steps = ["trainer.total_training_steps=1", "trainer.val_before_train=true", "data.val_batch_size=2"]
    return ["reward.reward_model.enable=true", f"reward.reward_model.model_path={folder}", *steps]


@pytest.fixture(scope="module")
def judged_apart(
    judged: list[str], tmp_path_factory: pytest.TempPathFactory, recipe_cache: Path
) -> tuple[Path, WatchedJob, list[dict[str, float]]]:
    """A run whose reward model has a device of its own."""
    folder = tmp_path_factory.mktemp("judged apart")
    given = ["reward.reward_model.device_mapping=[1]", *(f"{role}=[0]" for role in (ACTOR, CRITIC, ROLLOUT))]
    given += [f"trainer.debug.save_rollouts={folder / 'dump'}", f"{GPUS}=2"]
    return folder, *train(folder / "run", recipe_cache, *judged, *given)


def test_a_reward_model_has_a_device_and_a_process_of_its_own(judged: list[str], judged_apart: Any) -> None:
    """Its scores of the run's samples are those of transformers."""
    folder, job, steps = judged_apart
    found = as_planned(job)
    mine = found.pop("reward_model")
    assert list(mine) == [1] and {device for one in found.values() for device in one} == {0}
    assert not set(mine.values()) & {pid for one in found.values() for pid in one.values()}
    model = AutoModelForSequenceClassification.from_pretrained(judged[1].split("=")[1], num_labels=1)
    rows = read_dump(folder / "dump" / "step_1.safetensors")[0]
    whole = zip(rows.get("prompts").unbind(), rows.get("responses").unbind(), strict=True)
    with torch.no_grad():
        wanted = torch.tensor([float(model(torch.cat(one)[None]).logits[0, 0]) for one in whole])
    assert float((rows.get("score") - wanted).abs().max()) < 0.05 * float(wanted.std())  # it computes in bf16
    assert read_steps(folder / "run")[-1]["perf/mfu/reward_model_infer"] > 0
    assert steps[-1]["critic/score/mean"] == pytest.approx(float(rows.get("score").mean()), rel=1e-5)


def test_a_reward_model_takes_turns_with_all_on_its_device_and_changes_no_number(
    judged: list[str],
    judged_apart: Any,
    tmp_path: Path,
    recipe_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in validations, and in a run that only samples: the rollout sleeps while it scores."""
    notes = tmp_path / "notes"
    for name, noting in zip(("RolloutWorker", "RewardModelWorker"), noting_workers(notes)):
        monkeypatch.setattr(roles, name, noting)
    one_each = [f"{GPUS}=1", "trainer.fuse_roles=false"]
    job, rows = train(tmp_path / "run", recipe_cache, *judged, *one_each)
    assert rows == judged_apart[-1] and len(rows) == 2
    assert len({pid for found in as_planned(job).values() for pid in found.values()}) == 5
    validated = ["loads.", "samples.", "samples.", "sleeps.", "scores.", "scores."]
    wanted = [*validated, "loads.", "samples.", "sleeps.", "scores.", *validated]
    assert notes.read_text().split() == wanted
    notes.unlink()
    only = "trainer.debug.rollout_only=true"
    _, sampled = train(tmp_path / "sampled", recipe_cache, *judged, *one_each, only)
    assert notes.read_text().split() == wanted
    scores = {name: value for name, value in rows[1].items() if name.startswith("critic/score/")}
    assert scores and sampled[0] == rows[0] and sampled[1].items() >= scores.items()


def test_a_checkpoint_of_one_placement_resumes_in_another(
    fused: Any, apart: Any, tmp_path: Path, recipe_cache: Path
) -> None:
    resumed = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={apart[0]}/global_step_1"]
    job, rows = train(tmp_path, recipe_cache, *ONE_OF_TWO, *resumed)
    assert rows == fused[1:]
    found = as_planned(job)
    assert list(found["rollout"]) == [1] and found["rollout"][1] not in found["actor"].values()
    assert [set(beside) for beside in job.beside] == [{"actor", "critic", "ref"}]


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
    job, rows = train(tmp_path / "run", recipe_cache, *ELSEWHERE, *SMALL_BUCKETS)
    assert rows == fused
    as_planned(job)
    assert job.beside == [], "nobody else is on its devices, so it never sleeps"
    assert len(list(tmp_path.glob("died *"))) == 4
    said = [record.getMessage() for record in caplog.records if "is started again" in record.getMessage()]
    assert len(said) == 4 and all(text.startswith("rollout rank 0 on node ") for text in said)


def test_machines_of_its_own_for_the_rollout_need_a_cluster_with_as_many(
    tmp_path: Path, recipe_cache: Path
) -> None:
    own = ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=2"]
    with pytest.raises(
        ConfigError, match="needs 2 nodes, the cluster has 1\n.*no separate machines for a role"
    ):
        train(tmp_path, recipe_cache, f"{GPUS}=2", *own)


@pytest.fixture(scope="module")
def fused_grpo(tmp_path_factory: pytest.TempPathFactory, recipe_cache: Path) -> list[dict[str, float]]:
    folder = tmp_path_factory.mktemp("fused grpo")
    job, rows = train(folder, recipe_cache, f"{GPUS}=2", algorithm=GRPO)
    found = as_planned(job)
    assert found["actor"] == found["ref"] == found["rollout"]
    return rows


@pytest.mark.parametrize(
    ("overrides", "shared"),
    [
        (ELSEWHERE[:2] + ELSEWHERE[3:] + [f"{REF}=[0,1]"], [("actor", "ref")]),
        (OF_THREE, [("actor", "ref")]),
        (REFERENCE_APART, [("actor", "rollout")]),
    ],
    ids=["disaggregated", "overlapping", "reference apart"],
)
def test_no_placement_changes_a_number_of_grpo(
    overrides: list[str], shared: list[tuple[str, str]], fused_grpo: Any, tmp_path: Path, recipe_cache: Path
) -> None:
    job, rows = train(tmp_path, recipe_cache, *overrides, algorithm=GRPO)
    assert rows == fused_grpo and len(rows) == 2 and not any(name.startswith("critic/v") for name in rows[0])
    found = as_planned(job)
    assert [pair for pair in combinations(sorted(found), 2) if found[pair[0]] == found[pair[1]]] == shared


def test_overlapping_roles_of_different_sizes_change_no_number(tmp_path: Path, recipe_cache: Path) -> None:
    """A critic on one of the actor's devices, a rollout on the other and on one more. Compared with actor
    ranks that sample themselves: sums over the critic's ranks depend on how many there are."""
    _, wanted = train(tmp_path / "two", recipe_cache, f"{GPUS}=2", f"{CRITIC}=[0]")
    job, rows = train(tmp_path / "three", recipe_cache, *OF_THREE, *CRITIC_OF_THREE)
    assert rows == wanted and len(rows) == 2
    found = as_planned(job)
    assert {role: list(one) for role, one in found.items()} == {
        "actor": [0, 1],
        "ref": [0, 1],
        "critic": [0],
        "rollout": [1, 2],
    }
    assert len({pid for one in found.values() for pid in one.values()}) == 2 + 1 + 2
    assert [set(beside) for beside in job.beside] == [{"actor", "ref"}] * 2
