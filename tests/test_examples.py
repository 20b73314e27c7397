"""Every example composes, its batch plan resolves, and the small one runs as its README says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from jobs.command import LOCAL, hydraflow, read_steps

from hydraflow.batch_plan.resolve import BatchPlan, resolve_plan
from hydraflow.batch_plan.roles import needs_critic, needs_reference
from hydraflow.compose.launch import launch
from hydraflow.compose.loading import EntryPoint
from hydraflow.models.tiny import make_model
from hydraflow.schema import PPOConfig

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = sorted(file.stem for file in EXAMPLES.glob("*/*.yaml") if file.stem == file.parent.name)


def composed(name: str, monkeypatch: pytest.MonkeyPatch) -> PPOConfig:
    """What `main_ppo --config-dir examples/NAME --config-name NAME` gets to run."""
    seen: list[PPOConfig] = []
    monkeypatch.setattr(
        sys, "argv", ["main_ppo", "--config-dir", str(EXAMPLES / name), "--config-name", name]
    )
    assert launch(EntryPoint("ppo", PPOConfig), lambda config, command: seen.append(config)) == 0
    return seen[0]


def plan_of(config: PPOConfig, *, processes: int, prompts: int) -> BatchPlan:
    return resolve_plan(config, devices_per_node=processes, prompts=prompts)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_a_configuration_with_a_readme(name: str) -> None:
    assert f"--config-dir examples/{name} --config-name {name}" in (EXAMPLES / name / "README.md").read_text()
    assert yaml.safe_load((EXAMPLES / name / f"{name}.yaml").read_text())["defaults"][0] == "ppo"


def test_arithmetic_ppo_has_a_critic(monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed("arithmetic_ppo", monkeypatch)
    assert (config.recipe.name, needs_critic(config)) == ("arithmetic", True)
    plan = plan_of(config, processes=2, prompts=config.recipe.train_problems)
    assert (plan.trajectories_per_step, plan.actor.optimizer_steps_per_step, plan.total_steps) == (
        512,
        2,
        200,
    )


def test_qwen3_moe_megatron_fits_64_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(composed("qwen3_moe_megatron", monkeypatch), processes=8, prompts=7473)
    assert (plan.trajectories_per_step, plan.actor.optimizer_steps_per_step) == (8192, 4)
    actor, rollout = plan.layouts["actor"], plan.layouts["rollout"]
    assert (actor.data_ranks, actor.expert, rollout.replicas) == (16, 8, 16)


def test_gsm8k_grpo_fits_eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed("gsm8k_grpo", monkeypatch)
    assert (needs_critic(config), needs_reference(config)) == (False, True)
    plan = plan_of(config, processes=8, prompts=7473)
    assert (plan.trajectories_per_step, plan.actor.mini_batch_trajectories, plan.actor.rows_per_rank) == (
        2048,
        512,
        64,
    )
    assert (plan.actor.optimizer_steps_per_step, plan.total_steps) == (4, 290)


@pytest.mark.slow
def test_custom_reward_learns(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    make_model(tmp_path / "runs" / "tiny")
    given = ["--config-dir", "examples/custom_reward", "--config-name", "custom_reward", *LOCAL]
    done = hydraflow(
        "main_ppo", *given, "trainer.total_training_steps=15", "trainer.default_local_dir=out", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rewards = [row["critic/score/mean"] for row in read_steps(tmp_path / "out") if row["step"] > 0]
    assert rewards[0] < 0.2 and rewards[-1] > 0.5
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["last_val_accuracy"] >= 0.5

    files = [
        "data.path=examples/custom_reward/val.jsonl",
        "data.max_response_length=4",
        "output.path=runs/repeat.parquet",
    ]
    done = hydraflow(
        "main_generate",
        "model.path=out/final_model/actor",
        *files,
        *LOCAL,
        "rollout.temperature=0",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reward = ["reward.custom_reward_function.path=examples/custom_reward/repeat.py"]
    reward += ["+reward.custom_reward_function.reward_kwargs={times: 4}"]
    done = hydraflow("main_eval", "data.path=runs/repeat.parquet", *reward, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["repeat"]["acc/mean@1"] >= 0.5
