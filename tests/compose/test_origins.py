"""Where each value is from, and a run's saved configuration as the next run's input."""

import json
import sys
from dataclasses import asdict
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
from jobs.command import python

from hydraflow.compose.command import Command
from hydraflow.compose.command_words import public_words
from hydraflow.compose.keys import known_keys
from hydraflow.compose.launch import launch
from hydraflow.compose.loading import EntryPoint, load_command
from hydraflow.schema import GenerateConfig, PPOConfig, SFTConfig
from hydraflow.tracking.run_folder import RunFolder


def launched(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[PPOConfig, Command]:
    """What the command line gives `run`."""
    seen: list[tuple[PPOConfig, Command]] = []
    monkeypatch.setattr(sys, "argv", ["main_ppo", *words])
    assert launch(EntryPoint("ppo", PPOConfig), lambda config, command: seen.append((config, command))) == 0
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
    _, command = load_command(
        "ppo", PPOConfig, ["data.train_batch_size=96", "+trainer={seed: 2}", "++data.val_max_samples=5"]
    )
    assert {
        key: command.origins[key] for key in ("data.train_batch_size", "trainer.seed", "data.val_max_samples")
    } == dict.fromkeys(["data.train_batch_size", "trainer.seed", "data.val_max_samples"], "command line")
    assert command.origins["data.max_prompt_length"] == "config/recipe/arithmetic.yaml"
    assert command.origins["data.prompt_key"] == "default"


def test_a_key_inside_an_open_mapping_counts_for_the_mapping():
    _, command = load_command("ppo", PPOConfig, ["+reward.custom_reward_function.reward_kwargs.deep.er=1"])
    assert command.given == {"reward.custom_reward_function.reward_kwargs"}


def test_a_users_file_is_named_as_the_user_would(tmp_path, monkeypatch):
    (tmp_path / "config").mkdir()
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo, _self_]\nactor_rollout_ref: {model: {path: m}}\ndata: {train_files: t, shuffle:"
        " true}\n"
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
    folder = RunFolder.make(str(tmp_path), "ppo")
    folder.write_config(asdict(config), command.origins)
    again, after = launched(monkeypatch, "--config-dir", str(tmp_path), "--config-name", "config")
    assert again == config  # recipe=arithmetic, without the files that it made
    assert (after.origins, after.notes) == (command.origins, command.notes)
    changed, after = launched(
        monkeypatch,
        "--config-dir",
        str(tmp_path),
        "--config-name",
        "config",
        "trainer.seed=8",
        "+strict=true",
    )
    assert (changed.trainer.seed, changed.data.train_batch_size) == (8, 96)


@pytest.mark.parametrize(
    "kept", ['{"trainer.seed": {"value"', '{"trainer.seed": 3}', "[]", '{"trainer.seed": {}}']
)
def test_a_damaged_file_of_origins_counts_for_nothing(tmp_path, monkeypatch, kept):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("defaults: [ppo, _self_]\ntrainer: {seed: 7}\n")
    Path("mine_origins.json").write_text(kept)
    config, after = launched(monkeypatch, "--config-dir", ".", "--config-name", "mine", "recipe=arithmetic")
    assert config.trainer.seed == 7 and after.origins["trainer.seed"] == "mine.yaml"


def test_what_was_changed_in_a_saved_configuration_is_the_files(tmp_path, monkeypatch):
    config, command = load_command("ppo", PPOConfig, ["data.train_batch_size=96"])
    folder = RunFolder.make(str(tmp_path), "ppo")
    folder.write_config(asdict(config), command.origins)
    folder.config.write_text(
        folder.config.read_text().replace("max_prompt_length: 16", "max_prompt_length: 32")
    )
    monkeypatch.chdir(tmp_path)
    _, after = launched(monkeypatch, "--config-dir", ".", "--config-name", "config")
    assert after.origins["data.max_prompt_length"] == "config.yaml"
    assert after.origins["data.max_response_length"] == "config/recipe/arithmetic.yaml"
    assert after.origins["data.train_batch_size"] == "command line"


def test_each_run_of_a_sweep_has_its_own_origins(tmp_path):
    entry = Path(__file__).parent / "dummy_entry.py"
    result = python(
        str(entry), "ppo", "-m", "trainer.seed=1,2", "actor_rollout_ref.actor.grad_clip=0.5", cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert [json.loads(line)["given"] for line in result.stdout.splitlines()] == [
        ["actor_rollout_ref.actor.optim.clip_grad", "trainer.seed"]
    ] * 2


def test_what_is_from_the_environment_is_written_as_a_reference(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MY_TOKEN", "it's-s3cr3t")
    monkeypatch.setenv("MY_SEED", "7")
    section = "reward.custom_reward_function.reward_kwargs"
    words = [
        "trainer.wandb_proxy=http://me:${oc.env:MY_TOKEN}@${oc.env:NO_HOST,'a:1'}",
        "trainer.project_name=of-${trainer.wandb_proxy}",
        "trainer.seed=${oc.env:MY_SEED}",
        (
            f"+{section}={{key: '${{oc.env:MY_TOKEN}}', other: '${{.key}}', count:"
            " '${oc.decode:${oc.env:MY_SEED}}', n: 2}"
        ),
        "+ray_kwargs.ray_init.runtime_env.env_vars.A=${oc.env:MY_TOKEN}",
    ]
    config, command = launched(monkeypatch, *words)
    proxy = "http://me:${oc.env:MY_TOKEN}@${oc.env:NO_HOST,'a:1'}"
    reference = "${oc.env:MY_TOKEN}"
    assert command.written == {
        "trainer.wandb_proxy": proxy,
        "trainer.project_name": f"of-{proxy}",
        section: {"key": reference, "other": reference, "count": "${oc.decode:'${oc.env:MY_SEED}'}", "n": 2},
        "ray_init.runtime_env.env_vars": {"A": reference},
    }
    assert config.trainer.wandb_proxy == "http://me:it's-s3cr3t@a:1" and config.trainer.seed == 7
    kept = asdict(config)
    for key, value in command.written.items():
        *sections, name = key.split(".")
        reduce(getitem, sections, kept)[name] = value
    folder = RunFolder.make(str(tmp_path), "ppo")
    folder.write_config(kept, command.origins)
    assert "s3cr3t" not in folder.config.read_text() + folder.config_origins.read_text()
    again, after = launched(monkeypatch, "--config-dir", str(tmp_path), "--config-name", "config")
    assert again == config
    assert after.origins == {key: origin for key, origin in command.origins.items() if "env_vars." not in key}
    assert "s3cr3t" not in capsys.readouterr().err, "nor in a note about a key without effect"
    monkeypatch.setenv("MY_TOKEN", "another")
    again, _ = launched(monkeypatch, "--config-dir", str(tmp_path), "--config-name", "config")
    assert again.trainer.wandb_proxy == "http://me:another@a:1"


def test_secrets_of_a_saved_configuration_are_private_and_keep_their_origins(tmp_path, monkeypatch):
    config, command = load_command("ppo", PPOConfig, ["+trainer.wandb_proxy=http://me:s3cr3t@host:1"])
    folder = RunFolder.make(str(tmp_path), "ppo")
    folder.write_config(asdict(config), command.origins)
    folder.note_start({"after_step": 0})
    assert "s3cr3t" in folder.config.read_text() and "s3cr3t" not in folder.config_origins.read_text()
    for file in (folder.config, folder.config_origins, folder.run):
        assert file.stat().st_mode & 0o777 == 0o600
    own = ["--config-dir", str(tmp_path), "--config-name", "config"]
    assert launched(monkeypatch, *own)[1].origins["trainer.wandb_proxy"] == "command line"
    folder.config.write_text(folder.config.read_text().replace("s3cr3t", "t00"))
    assert launched(monkeypatch, *own)[1].origins["trainer.wandb_proxy"].endswith("config.yaml"), (
        "the secret is another one"
    )


def test_the_command_is_kept_without_its_secrets(monkeypatch):
    words = [
        "+ray_init.runtime_env.env_vars={HF_TOKEN: s3cr3t, A: s3cr3t}",
        "trainer.wandb_proxy=http://me:s3cr3t@h:1",
        "trainer.seed=2",
    ]
    words += [
        "+reward.custom_reward_function.reward_kwargs={url: 'https://h/?api_key=s3cr3t', PASS: two s3cr3t,"
        " n: 1}"
    ]
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "hydraflow.main_ppo", *words])
    said = launched(monkeypatch, *words)[1].words
    assert said == (
        "python",
        "-m",
        "hydraflow.main_ppo",
        "+ray_init.runtime_env.env_vars={HF_TOKEN: (hidden), A: (hidden)}",
        "trainer.wandb_proxy=http://(hidden)@h:1",
        "trainer.seed=2",
        (
            "+reward.custom_reward_function.reward_kwargs={url: https://h/?api_key=(hidden), PASS: (hidden),"
            " n: 1}"
        ),
    )


@pytest.mark.parametrize(
    "word",
    [
        *(
            "a={PASSWORD: two s3cr3t}",
            "a={DB_PASSWORD:ab's3cr3t}",
            "a={HF_TOKEN : s3cr3t}",
            r"a.PASSWORD=a\,s3cr3t",
            "a.PASS='it s3cr3t",
        ),
        *(
            "a={HF_TOKEN: [s3cr3t, {b: s3cr3t}]}",
            "a.api_key=s3cr3t,s3cr3t",
            "a={x: 'Authorization: Bearer s3cr3t.s3cr3t'}",
        ),
        *(
            "a={x: 'https://h/?n=1&sig=s3cr3t'}",
            "a='user:s3cr3t@host:1'",
            "a={MY_KEYS: s3cr3t",
            "--hf-token=s3cr3t",
        ),
        *(
            "~a.api_key=s3cr3t",
            "a.api_key=glob(s3cr3t*)",
            "++a={env_vars:{B:s3cr3t}",
            "++a={c:1,env_vars: {B: 1, C: s3cr3t}",
        ),
        *("https://u:s3cr3t@h/x", "https://u:s3cr3t@h/?a=1", "hf_s3cr3ts3cr3ts3cr3t"),
        *("a.env_vars={B: [s3cr3t]}", "hydra.job.env_set.B=s3cr3t", "a={x: \"{'password': 's3cr3t'}\"}"),
    ],
)
def test_however_it_is_written_a_secret_is_found(word):
    [shown] = public_words([word])
    assert "s3cr3t" not in shown and "(hidden)" in shown


@pytest.mark.parametrize(
    "word",
    [
        "a=1,2",
        "a=range(1,3)",
        "~a",
        "a={b: 'x y', c: [1]}",
        "--cfg",
        "job",
        "a=${oc.env:B}",
        "a={api_key: '${oc.env:B}'}",
    ],
)
def test_words_without_secrets_stay_as_they_were_typed(word):
    assert public_words([word]) == [word]
