"""Where each value is from, and a run's saved configuration as the next run's input."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from hydraflow.compose.command import Command
from hydraflow.compose.keys import known_keys
from hydraflow.compose.launch import launch
from hydraflow.compose.loading import load_command
from hydraflow.schema import GenerateConfig, PPOConfig, SFTConfig
from hydraflow.tracking.run_folder import RunFolder


def launched(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[PPOConfig, Command]:
    """What the command line gives `run`."""
    seen: list[tuple[PPOConfig, Command]] = []
    monkeypatch.setattr(sys, "argv", ["main_ppo", *words])
    assert launch("ppo", PPOConfig, lambda config, command: seen.append((config, command))) == 0
    return seen[0]


def test_every_leaf_has_an_origin():
    for name, schema, words in (
        ("ppo", PPOConfig, []),
        ("sft", SFTConfig, ["model.path=m", "data.train_files=t"]),
        ("generate", GenerateConfig, ["model.path=m", "data.path=p", "output.path=o"]),
    ):
        _, command = load_command(name, schema, words)
        assert set(command.origins) == {key.path for key in known_keys(schema).values() if not key.is_section}
        assert command.given == {word.partition("=")[0] for word in words}


def test_default_file_and_command_line():
    _, command = load_command("ppo", PPOConfig, ["data.train_batch_size=96", "+trainer={seed: 2}", "++data.val_max_samples=5"])
    assert {key: command.origins[key] for key in ("data.train_batch_size", "trainer.seed", "data.val_max_samples")} == dict.fromkeys(
        ["data.train_batch_size", "trainer.seed", "data.val_max_samples"], "command line"
    )
    assert command.origins["data.max_prompt_length"] == "config/recipe/arithmetic.yaml"
    assert command.origins["data.prompt_key"] == "default"


def test_a_key_inside_an_open_mapping_counts_for_the_mapping():
    _, command = load_command("ppo", PPOConfig, ["+reward.custom_reward_function.reward_kwargs.deep.er=1"])
    assert command.given == {"reward.custom_reward_function.reward_kwargs"}


def test_a_users_file_is_named_as_the_user_would(tmp_path, monkeypatch):
    (tmp_path / "config").mkdir()
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo, _self_]\nactor_rollout_ref: {model: {path: m}}\ndata: {train_files: t, shuffle: true}\n"
    )
    (tmp_path / "config" / "big.yaml").write_text(
        "defaults: [ppo, _self_]\nactor_rollout_ref: {model: {path: m}}\ndata: {train_files: t}\n"
    )
    monkeypatch.chdir(tmp_path)
    _, command = launched(monkeypatch, "--config-dir", ".", "--config-name", "mine", "trainer.seed=5")
    assert command.origins["data.shuffle"] == "mine.yaml"  # set to what is the default anyway
    assert (command.origins["trainer.seed"], command.origins["data.val_files"]) == ("command line", "default")
    _, command = launched(monkeypatch, "--config-dir", "config", "--config-name", "big")
    assert command.origins["data.train_files"] == "./config/big.yaml"


def test_a_group_of_the_users_is_named_too(tmp_path, monkeypatch):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "big.yaml").write_text("# @package _global_\ntrainer: {nnodes: 2}\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "short.yaml").write_text("max_prompt_length: 64\n")
    monkeypatch.chdir(tmp_path)
    own = ["actor_rollout_ref.model.path=m", "data.train_files=t"]
    config, command = launched(monkeypatch, "--config-dir", ".", "experiment=big", "+data=short", *own)
    assert (config.trainer.nnodes, config.data.max_prompt_length) == (2, 64)
    assert command.origins["trainer.nnodes"] == "experiment/big.yaml"
    assert command.origins["data.max_prompt_length"] == "data/short.yaml"
    assert command.origins["data.train_files"] == "command line"


def test_what_a_run_saved_can_be_run_again(tmp_path, monkeypatch):
    config, command = load_command("ppo", PPOConfig, ["data.train_batch_size=96", "trainer.seed=7"])
    folder = RunFolder.create(str(tmp_path), "ppo")
    folder.write_config(asdict(config), command.origins)
    again, after = launched(monkeypatch, "--config-dir", str(tmp_path), "--config-name", "config")
    assert again == config  # recipe=arithmetic, without the files that it made
    assert (after.origins, after.notes) == (command.origins, command.notes)
    changed, after = launched(monkeypatch, "--config-dir", str(tmp_path), "--config-name", "config", "trainer.seed=8", "+strict=true")
    assert (changed.trainer.seed, changed.data.train_batch_size) == (8, 96)


def test_what_was_changed_in_a_saved_configuration_is_the_files(tmp_path, monkeypatch):
    config, command = load_command("ppo", PPOConfig, ["data.train_batch_size=96"])
    folder = RunFolder.create(str(tmp_path), "ppo")
    folder.write_config(asdict(config), command.origins)
    folder.config.write_text(folder.config.read_text().replace("max_prompt_length: 16", "max_prompt_length: 32"))
    monkeypatch.chdir(tmp_path)
    _, after = launched(monkeypatch, "--config-dir", ".", "--config-name", "config")
    assert after.origins["data.max_prompt_length"] == "config.yaml"
    assert after.origins["data.max_response_length"] == "config/recipe/arithmetic.yaml"
    assert after.origins["data.train_batch_size"] == "command line"


def test_each_run_of_a_sweep_has_its_own_origins(tmp_path):
    entry = Path(__file__).parent / "dummy_entry.py"
    env = {**os.environ, "PYTHONPATH": str(entry.parents[2])}
    words = [sys.executable, str(entry), "ppo", "-m", "trainer.seed=1,2", "actor_rollout_ref.actor.grad_clip=0.5"]
    result = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert [json.loads(line)["given"] for line in result.stdout.splitlines()] == [
        ["actor_rollout_ref.actor.optim.clip_grad", "trainer.seed"]
    ] * 2
