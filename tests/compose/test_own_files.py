"""YAML files that a user brings, those over verl's configuration among them: they are read, whatever their
name."""

import json
import subprocess
from functools import reduce
from pathlib import Path

import pytest
from compose import here, legal

from hydraflow.compose import verl
from hydraflow.compose.arguments import split
from hydraflow.compose.own_files import take
from hydraflow.compose.patterns import expand
from hydraflow.compose.rules import problems
from hydraflow.compose.verl_table import defaults, tables
from hydraflow.errors import ConfigError
from hydraflow.schema import PPOConfig

CONFIG = Path(__file__).parents[2] / "config"
ACTOR = "actor_rollout_ref.actor"
OWN = ["actor_rollout_ref.model.path=m", "data.train_files=t"]
BASE = "data: {train_batch_size: 48}\nactor_rollout_ref: {actor: {ppo_mini_batch_size: 24}}\n"
TREES = """
defaults:
  - model_engine: dp
  - actor@actor_rollout_ref.actor: ${model_engine}_actor
  - data@data: legacy_data
  - ref@actor_rollout_ref.ref: dp_ref
  - algorithm@algorithm.rollout_correction: rollout_correction
  - _self_
actor_rollout_ref: {rollout: {max_model_len: "${data.max_prompt_length}"}}
"""


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return here.call(folder, "ppo", *arguments)


def config(result: subprocess.CompletedProcess[str]) -> dict:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["config"]


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    assert (result.returncode, result.stdout) == (2, ""), result.stdout
    assert "Traceback" not in result.stderr and "Warning" not in result.stderr
    return result.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--config-path", "my", "--config-name", "ppo_trainer"],
        ["--config-path=config", "--config-name=ppo_trainer.yaml"],
        ["--config-dir", "my", "--config-name", "ppo_trainer"],
        ["--config-name", "my/ppo_trainer.yaml"],
    ],
)
def test_a_users_file_of_verls_name_is_read(tmp_path, options):
    folder = tmp_path / ("config" if "=config" in options[0] else "my")
    folder.mkdir()
    (folder / "ppo_trainer.yaml").write_text(BASE + "trainer: {nnodes: 2}\n")
    seen = config(call(tmp_path, *options, *OWN))
    assert (seen["data"]["train_batch_size"], seen["trainer"]["nnodes"]) == (48, 2)


def test_a_file_with_another_ending_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine.yml").write_text("trainer:\n  seed: 3\n")
    with pytest.raises(ConfigError) as caught:
        take(split(["--config-dir", str(tmp_path), "--config-name", "mine.yml"]), CONFIG, PPOConfig)
    [problem] = caught.value.problems
    assert problem.field == "--config-name mine.yml" and problem.remedy == "rename it to mine.yaml"


def test_a_file_over_verls_defaults_composes(tmp_path):
    """As verl's examples write it, for a clone of verl that is not there."""
    searched = "hydra:\n  searchpath: [file://verl/trainer/config]\ndefaults: [ppo_trainer, _self_]\n"
    (tmp_path / "mine.yaml").write_text(searched + BASE)
    result = call(tmp_path, f"--config-path={tmp_path}", "--config-name=mine", *OWN, "model_engine=megatron")
    seen = config(result)
    assert (seen["data"]["train_batch_size"], seen["data"]["max_prompt_length"]) == (48, 512)
    assert seen["actor_rollout_ref"]["actor"]["strategy"] == seen["critic"]["strategy"] == "megatron"
    assert "Warning" not in result.stderr


@pytest.mark.parametrize(
    ("content", "strategies"),
    [
        (TREES, ("fsdp2", "fsdp2")),
        ("defaults: [ppo_trainer, override model_engine: megatron, _self_]\n", ("megatron", "megatron")),
        ("defaults: [ppo_megatron_trainer, _self_]\n", ("megatron", "megatron")),
        ("defaults: [ppo_trainer, override critic@critic: megatron_critic, _self_]\n", ("fsdp2", "megatron")),
    ],
)
def test_a_defaults_list_may_name_verls_trees(tmp_path, content, strategies):
    (tmp_path / "mine.yaml").write_text(content)
    seen = config(call(tmp_path, "--config-dir", ".", "--config-name", "mine", *OWN))
    assert (seen["actor_rollout_ref"]["actor"]["strategy"], seen["critic"]["strategy"]) == strategies
    if content is TREES:
        assert seen["actor_rollout_ref"]["rollout"]["max_model_len"] == 512


def test_a_users_tree_goes_before_its_stand_in(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\n")
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "dp_actor.yaml").write_text("ppo_epochs: 3\n")
    seen = config(call(tmp_path, "--config-path", ".", "--config-name", "mine", *OWN))
    assert seen["actor_rollout_ref"]["actor"]["ppo_epochs"] == 3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--config-path", "/nope", "--config-name", "ppo_trainer"],
            "/nope: there is no such folder\n      ->",
        ),
        (["--config-path", "yours", "--config-name", "mine"], "-> --config-path your"),
        (["--config-path", "your", "--config-name", "mein"], "-> --config-name mine"),
        (
            ["--config-path", "your", "--config-name", "ppo_trainer"],
            "-> leave out --config-path: ppo_trainer",
        ),
        (["--config-path", "your/mine.yaml"], "is a file, not a folder\n      -> --config-path your"),
        (["--config-path", "your", "--config-name", "mine"], "data.new=3: unknown key"),
    ],
)
def test_what_is_not_there_is_named_with_a_remedy(tmp_path, options, expected):
    (tmp_path / "your").mkdir()
    (tmp_path / "your" / "mine.yaml").write_text("data: {new: 3}\n")
    assert expected in refusal(call(tmp_path, *options))


# --- verl's own defaults in a file --------------------------------------------------


def test_untouched_defaults_of_any_version_are_accepted_in_a_file():
    """What verl prints as its whole configuration, values that follow others left out."""
    ours = {key: value for key, value in defaults(PPOConfig).items() if value is not ...}
    for pattern, default in tables(PPOConfig).other_defaults.items():
        ours |= {
            key: default for key in expand(pattern) if not any(known.startswith(f"{key}.") for known in ours)
        }
    judged = legal.judged(ours, origin="mine.yaml")
    assert [str(problem) for problem in judged.problems] == []
    assert len(judged.translation.notes) < 60
    assert judged.translation.untouched["mine.yaml"] > 500
    config = PPOConfig()
    config.actor_rollout_ref.rollout.name = "vllm"  # verl has no default
    for key, value in judged.leaves.items():
        *sections, name = key.split(".")
        setattr(reduce(getattr, sections, config), name, value)
    assert [str(problem) for problem in problems(config, planning=True)] == []


@pytest.mark.parametrize("value", [None, False, {}, [], 0, -1, "", "disabled"])
def test_a_key_of_another_version_that_is_off_is_accepted_in_a_file(value):
    judged = legal.judged({"actor_rollout_ref.rollout.brand_new": value}, origin="mine.yaml")
    assert judged.problems == []
    assert judged.translation.notes == [
        "mine.yaml: 1 of verl's keys is off or at verl's default, without effect here"
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor_rollout_ref.rollout.brand_new", 1),  # it asks for something
        (f"{ACTOR}.use_kl_los", False),  # a typo
        ("nowhere.brand_new", False),  # no section of verl's
    ],
)
def test_other_unknown_keys_of_a_file_are_refused(key, value):
    assert [problem.field for problem in legal.judged({key: value}, origin="mine.yaml").problems] == [key]


def test_off_is_not_nothing_where_verls_default_is_on():
    [problem] = legal.judged({"actor_rollout_ref.hybrid_engine": False}, origin="mine.yaml").problems
    assert "in verl it would give actor and rollout separate engines" in problem.rule


def test_on_the_command_line_an_unknown_key_is_refused_even_if_it_is_off():
    key = "actor_rollout_ref.rollout.brand_new"
    assert legal.judged({key: None}).problems != []
    assert verl.is_off(None)
