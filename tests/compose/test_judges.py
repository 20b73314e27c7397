"""What each command says against its configuration: missing files, and the plan of the machines that a run
uses."""

import pytest

from hydraflow.compose.judges import judge, missing
from hydraflow.compose.loading import load_command
from hydraflow.errors import ConfigError
from hydraflow.options import walk
from hydraflow.plan import Planning
from hydraflow.schema import EvalConfig, GenerateConfig, PPOConfig, SFTConfig

MACHINES = ["cluster=h100", "cluster.nodes=64"]


def judged(*overrides):
    return load_command("ppo", PPOConfig, ["trainer.device=cpu", *overrides], judges=(judge, missing))[1]


def test_machines_that_are_planned_for_change_nothing():
    command = judged(*MACHINES)
    assert any(note.startswith("cluster.nodes=64: has no effect") for note in command.notes)
    with pytest.raises(ConfigError) as caught:
        judged(*MACHINES, "actor_rollout_ref.actor.ppo_mini_batch_size=48")
    (problem,) = caught.value.problems
    assert problem.rule == "must divide data.train_batch_size=64"


def test_a_reference_that_follows_the_actor_repeats_no_mistake():
    """Its sizes are copies of the actor's, as in verl; a remedy changes both."""
    actor, ref = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
    size = "megatron.tensor_model_parallel_size"
    given = [f"{actor}.strategy=megatron", f"{actor}.use_kl_loss=true", "trainer.n_gpus_per_node=4"]
    with pytest.raises(ConfigError) as caught:
        judged(*given, f"{actor}.{size}=3")
    assert {problem.field for problem in caught.value.problems} == {f"{actor}.{size}"}
    judged(*given, f"{actor}.{size}=2")
    with pytest.raises(ConfigError) as caught:
        judged(*given, f"{actor}.{size}=2", f"{ref}.{size}=3")
    assert {problem.field for problem in caught.value.problems} == {f"{ref}.{size}"}


NOWHERE = "/nowhere/at/all"
MODEL, CUSTOM = "actor_rollout_ref.model.path", "reward.custom_reward_function.path"
MISSING = [
    ("ppo", PPOConfig, [MODEL, "critic.model.path", "data.train_files", "data.val_files", CUSTOM]),
    ("sft", SFTConfig, ["model.path", "data.train_files", "data.val_files"]),
    ("generate", GenerateConfig, ["model.path", "data.path"]),
    ("eval", EvalConfig, ["data.path", CUSTOM]),
]


@pytest.mark.parametrize(("name", "schema", "keys"), MISSING, ids=[case[0] for case in MISSING])
def test_everything_that_is_missing_comes_at_once_with_the_other_mistakes(name, schema, keys):
    words = [f"{key}={NOWHERE}" for key in keys] + (["output.path=out.parquet"] if name == "generate" else [])
    with pytest.raises(ConfigError) as caught:
        load_command(name, schema, [*words, "strict=perhaps"], missing=missing)
    assert sorted(problem.field for problem in caught.value.problems) == sorted([*keys, "strict"])
    with pytest.raises(ConfigError) as caught:
        load_command(name, schema, words, judges=(missing,))
    assert sorted(problem.field for problem in caught.value.problems) == sorted(keys)


def test_missing_files_alone_are_left_to_the_job():
    config, _ = load_command(
        "sft", SFTConfig, [f"model.path={NOWHERE}", f"data.train_files={NOWHERE}"], missing=missing
    )
    assert config.model.path == NOWHERE


def test_supervised_training_shares_packed_rows_only():
    size = "fsdp_config.ulysses_sequence_parallel_size=2"
    given = [f"{path}=a.parquet" for path in ("model.path", "data.train_files")]
    given += ["trainer.device=cpu", "trainer.n_gpus_per_node=2", size]
    assert load_command("sft", SFTConfig, given, judges=(judge,))
    with pytest.raises(ConfigError) as caught:
        load_command("sft", SFTConfig, [*given, "model.use_remove_padding=false"], judges=(judge,))
    [problem] = caught.value.problems
    assert problem.field == "model.use_remove_padding" and size in problem.rule


def test_generation_refuses_what_needs_a_missing_library(monkeypatch):
    monkeypatch.setattr("hydraflow.options.Library.is_installed", False)
    given = [f"{path}=a.parquet" for path in ("model.path", "data.path", "output.path")]
    with pytest.raises(ConfigError) as caught:
        load_command("generate", GenerateConfig, [*given, "rollout.name=vllm"], judges=(judge,))
    [problem] = [one for one in caught.value.problems if "not installed" in one.rule]
    assert problem.field == "rollout.name" and "scripts/install_vllm_cpu.sh" in problem.remedy


def test_files_that_a_run_does_not_read_need_not_be_there(tmp_path):
    words = [
        f"critic.model.path={NOWHERE}",
        "algorithm.adv_estimator=grpo",
        "trainer.val_only=true",
        f"data.train_files={NOWHERE}",
    ]
    (tmp_path / "val.jsonl").touch()
    judged(*words, f"{MODEL}=org/name", f"data.val_files={tmp_path}/val.jsonl")


CHOICES = [leaf.key for leaf in walk(PPOConfig()) if leaf.option.rule and leaf.option.rule.choices]


@pytest.mark.parametrize("key", CHOICES)
def test_a_choice_that_does_not_exist_is_reported_and_no_judge_looks_it_up(key):
    given = [f"{key}={['nope'] if key == 'trainer.logger' else 'nope'}", "global_profiler.steps=[2]"]
    with pytest.raises(ConfigError) as caught:
        load_command("ppo", PPOConfig, given, judges=(judge, Planning().judge))
    assert key in [problem.field for problem in caught.value.problems]
