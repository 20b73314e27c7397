"""Runs that start from a checkpoint in Megatron-Core's own format: the numbers of the Hugging Face directory
that the merger makes of it, and refusals before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from jobs.command import STEPS_ALONE, assert_refused, hydraflow, read_steps, write_sums

from hydraflow.compose.loading import load
from hydraflow.jobs.ppo import PPOJob
from hydraflow.model_merger.__main__ import main
from hydraflow.models.tiny import make_model
from hydraflow.schema import PPOConfig

pytestmark = pytest.mark.slow

ACTOR, REF, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"
STEPS = [
    "data.train_batch_size=4",
    "data.max_response_length=8",
    f"{ACTOR}.ppo_mini_batch_size=2",
    f"{ACTOR}.optim.lr=0.01",
    f"{ACTOR}.use_kl_loss=true",
    "actor_rollout_ref.rollout.n=2",
    "algorithm.adv_estimator=gae",
    "trainer.total_training_steps=2",
    "trainer.save_freq=-1",
    "trainer.test_freq=-1",
    *STEPS_ALONE,
    "trainer.n_gpus_per_node=2",
    "reward.num_workers=1",
    f"{ACTOR}.strategy=megatron",
    f"{ACTOR}.megatron.tensor_model_parallel_size=2",
    f"{CRITIC}.strategy=megatron",
    f"{CRITIC}.megatron.tensor_model_parallel_size=2",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a checkpoint of Megatron-Core, the same as a Hugging Face directory, that without weights,
    prompts, and a reward function."""
    made = tmp_path_factory.mktemp("core")
    make_model(made / "first", hidden=32, layers=2, heads=2, kv_heads=2)
    where = ("--hf_dir", str(made / "first"), "--target_dir", str(made / "core"))
    assert main(["split", "--backend", "megatron", "--world_size", "2", *where]) == 0
    assert main(["merge", "--local_dir", str(made / "core"), "--target_dir", str(made / "merged")]) == 0
    shutil.copytree(made / "merged", made / "config", ignore=shutil.ignore_patterns("*.safetensors"))
    write_sums(made, 8)
    return made


def given(folder: Path, model: str, run: str) -> list[str]:
    files = [f"actor_rollout_ref.model.path={folder / model}", f"data.train_files={folder / 'data.parquet'}"]
    files.append(f"reward.custom_reward_function.path={folder / 'reward.py'}")
    return [*STEPS, *files, f"trainer.default_local_dir={folder / run}"]


def from_core(path: Path, *sections: str) -> list[str]:
    values = {"use_dist_checkpointing": "true", "dist_checkpointing_path": path}
    return [f"{section}.megatron.{key}={value}" for section in sections for key, value in values.items()]


def trained(folder: Path, model: str, run: str, *overrides: str) -> list[dict[str, Any]]:
    """What the steps compute, in this process's Ray."""
    PPOJob(load("ppo", PPOConfig, [*given(folder, model, run), *overrides])).run()
    kinds = ("actor/", "critic/", "response_length/", "step")
    lines = read_steps(folder / run)
    return [{name: value for name, value in line.items() if name.startswith(kinds)} for line in lines]


@pytest.mark.usefixtures("ray_session")
def test_a_run_starts_from_it_as_from_the_merged_model(folder: Path) -> None:
    """Actor, reference and critic, on two tensor-parallel ranks each; `model.path` has no weights."""
    wanted = trained(folder, "merged", "from_merged")
    found = trained(folder, "config", "from_core", *from_core(folder / "core", ACTOR, REF, CRITIC))
    assert [line["step"] for line in wanted] == [1, 2]
    assert {"actor/grad_norm", "actor/kl_loss", "critic/vf_loss"} <= wanted[0].keys()
    assert found == wanted


def test_what_does_not_fit_is_refused_before_anything_starts(folder: Path) -> None:
    """A reference without weights, a directory of Hugging Face's, another model."""
    keys = given(folder, "config", "refused")

    def refused(*words: str, overrides: list[str]) -> None:
        assert_refused(hydraflow("main_ppo", *keys, *overrides, cwd=folder), *words)

    refused("this directory has no weights", overrides=from_core(folder / "core", ACTOR, CRITIC))
    path = f"{ACTOR}.megatron.dist_checkpointing_path"
    everything = from_core(folder / "core", ACTOR, REF, CRITIC)
    other = f"{path}={folder / 'merged'}"
    remedy = f"{folder / 'merged'} as the path of the model"
    refused(other, "there is no common.pt in it", remedy, overrides=[*everything, other])
    wider = "+actor_rollout_ref.model.override_config.intermediate_size=48"
    refused(str(folder / "core"), "of another shape", ", not [2, 96, 32]", overrides=[*everything, wider])
