"""Composition in this process: defaults, the recipe, forms of overrides, problems."""

from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

import hydraflow
from hydraflow.compose.launch import run_guarded
from hydraflow.compose.loading import load, load_command
from hydraflow.compose.overrides import config_folder
from hydraflow.errors import ConfigError
from hydraflow.schema import EvalConfig, GenerateConfig, PPOConfig, SFTConfig

OWN = ["actor_rollout_ref.model.path=model", "data.train_files=train.parquet"]


def test_defaults_stand_in_the_dataclasses_alone():
    expected = PPOConfig()
    expected.actor_rollout_ref.model.path, expected.data.train_files = "model", "train.parquet"
    assert load("ppo", PPOConfig, OWN) == expected


def test_every_entry_point_composes():
    assert load("sft", SFTConfig, ["model.path=m", "data.train_files=[a,b]"]).data.train_files == ["a", "b"]
    assert (
        load("generate", GenerateConfig, ["model.path=m", "data.path=p", "output.path=o"]).model.path == "m"
    )
    assert load("eval", EvalConfig, ["data.path=out.parquet"]).data.path == "out.parquet"


def test_the_recipe_applies_when_neither_model_nor_data_is_given():
    config = load("ppo", PPOConfig)
    assert (config.recipe.name, config.algorithm.adv_estimator) == ("arithmetic", "grpo")
    # What the recipe's file leaves out keeps its default.
    assert config.recipe.train_problems == PPOConfig().recipe.train_problems
    assert load("ppo", PPOConfig, OWN).recipe.name == "none"
    with pytest.raises(ConfigError, match="data.train_files=null"):
        load("ppo", PPOConfig, OWN[:1])
    with pytest.raises(ConfigError, match="data.train_files=null"):
        load("ppo", PPOConfig, ["data.val_files=val.parquet"])
    with pytest.raises(ConfigError, match="data.val_files=val.parquet: recipe=arithmetic makes its own"):
        load("ppo", PPOConfig, ["recipe=arithmetic", "data.val_files=val.parquet"])
    with pytest.raises(ConfigError, match="actor_rollout_ref.model.path=null"):
        load("ppo", PPOConfig, ["recipe=none"])


def test_an_override_wins_over_the_recipe():
    assert (
        load("ppo", PPOConfig, ["data.train_batch_size=32", "+recipe=arithmetic"]).data.train_batch_size == 32
    )


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_all_three_forms_set_a_known_key(sign):
    assert load("ppo", PPOConfig, [f"{sign}trainer.seed=7"]).trainer.seed == 7
    assert load("ppo", PPOConfig, [f"{sign}recipe=arithmetic"]).recipe.name == "arithmetic"


def test_open_subtrees_take_anything():
    kwargs = "reward.custom_reward_function.reward_kwargs"
    config = load("ppo", PPOConfig, [f"{kwargs}={{a: 1}}", f"+{kwargs}.deep.er=[1,x]"])
    assert config.reward.custom_reward_function.reward_kwargs == {"a": 1, "deep": {"er": [1, "x"]}}


def test_interpolations_are_resolved_against_all_keys():
    assert (
        load(
            "ppo", PPOConfig, ["trainer.seed=${data.train_batch_size}", "data.train_batch_size=96"]
        ).trainer.seed
        == 96
    )
    with pytest.raises(ConfigError, match="data.nothing"):
        load("ppo", PPOConfig, ["trainer.seed=${data.nothing}"])


def test_text_of_the_environment_stands_for_a_number(monkeypatch):
    monkeypatch.setenv("HYDRAFLOW_TEST_NODES", "3")
    assert load("ppo", PPOConfig, ["trainer.nnodes=${oc.env:HYDRAFLOW_TEST_NODES}"]).trainer.nnodes == 3
    monkeypatch.setenv("HYDRAFLOW_TEST_NODES", "many")
    with pytest.raises(ConfigError, match="trainer.nnodes=many: must be a whole number, not text"):
        load("ppo", PPOConfig, ["trainer.nnodes=${oc.env:HYDRAFLOW_TEST_NODES}"])


def test_all_problems_of_the_overrides_are_reported_together():
    overrides = [
        "data.train_bach_size=4",
        "trainer.seed=1.5",
        "recipe=nothing",
        "trainer.logger=console,file",
        "foo",
        "data=5",
    ]
    with pytest.raises(ConfigError) as caught:
        load("ppo", PPOConfig, overrides)
    found = {problem.field: problem for problem in caught.value.problems}
    assert set(found) == {"data.train_bach_size", "trainer.seed", "recipe", "trainer.logger", "foo", "data"}
    assert found["data.train_bach_size"].remedy.startswith("data.train_batch_size=4")
    assert found["trainer.seed"].rule == "must be a whole number"
    assert found["recipe"].remedy == "recipe=arithmetic or recipe=arithmetic_megatron or recipe=none"
    assert "--multirun" in found["trainer.logger"].rule


def test_keys_inside_a_mapping_are_checked():
    with pytest.raises(ConfigError, match="data.trin_files=x: unknown key"):
        load("ppo", PPOConfig, ["data={trin_files: x}"])


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ("reward.functions={name: math}", "must be a list such as [a,b], not a mapping"),
        ("reward.judge.parameters=[1]", "must be a mapping such as {name: value}, not a list"),
    ],
)
def test_a_value_of_another_kind_is_named(given: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("ppo", PPOConfig, [given])
    [problem] = caught.value.problems
    assert (f"{problem.field}={problem.value}", problem.rule) == (given, rule)


def test_all_problems_of_values_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        load(
            "ppo",
            PPOConfig,
            ["algorithm.adv_estimator=grop", "trainer.nnodes=0", "actor_rollout_ref.rollout.top_p=0"],
        )
    assert [problem.field for problem in caught.value.problems] == [
        "actor_rollout_ref.rollout.top_p",
        "algorithm.adv_estimator",
        "trainer.nnodes",
    ]
    assert caught.value.problems[1].remedy == "algorithm.adv_estimator=grpo"


def test_deleting_a_key_restores_its_default():
    assert (
        load("ppo", PPOConfig, ["~data.train_batch_size"]).data.train_batch_size
        == PPOConfig().data.train_batch_size
    )


def test_given_keys_are_those_of_the_command_line():
    _, command = load_command("ppo", PPOConfig, ["+data.shuffle=false", "hydra.run.dir=x", "trainer.seed=1"])
    assert command.given == {"data.shuffle", "trainer.seed"}


def test_the_config_folder_is_found_beside_the_package_or_in_it():
    folder = config_folder("ppo")
    assert (folder / "recipe" / "arithmetic.yaml").is_file()
    assert folder.parent in Path(hydraflow.__file__).parents[:2]


@pytest.mark.parametrize(("code", "work"), [(0, lambda: None), (7, lambda: 7)])
def test_run_guarded_returns_the_code(code, work):
    assert run_guarded(work) == code


def test_the_recipes_problems_are_counted_with_all_other_mistakes():
    with pytest.raises(ConfigError) as caught:
        load("ppo", PPOConfig, ["recipe.train_problems=20000", "trainer.nnodes=0"])
    assert {one.field for one in caught.value.problems} == {"recipe.train_problems", "trainer.nnodes"}
    rule = "and recipe.val_problems=500 must be at most 10000 together"
    assert any(one.rule == rule for one in caught.value.problems)


@pytest.mark.parametrize("word", ["recipe=arithmetic", "cluster=h100", "++recipe=none"])
def test_a_section_of_another_command_is_named(word):
    with pytest.raises(ConfigError) as caught:
        load("sft", SFTConfig, ["model.path=m", "data.train_files=a", word])
    key = word.lstrip("+").partition("=")[0]
    assert [(one.field, one.remedy) for one in caught.value.problems] == [(key, f"leave out {key}")]


def test_a_key_that_no_file_could_be_named_after():
    with pytest.raises(ConfigError, match="unknown key"):
        load("ppo", PPOConfig, ["x" * 300 + "=1"])


def test_no_composition_changes_the_defaults_of_the_next():
    """They are in Hydra's store, which is not copied for each."""
    load("ppo", PPOConfig, OWN)
    stored = ConfigStore.instance().repo["schema_ppo.yaml"].node
    defaults = OmegaConf.to_container(stored)
    load("ppo", PPOConfig, [*OWN, "trainer.seed=3", "trainer.logger=[file]", "algorithm.adv_estimator=rloo"])
    with pytest.raises(ConfigError):
        load("ppo", PPOConfig, ["++data.nope=1", "trainer.nnodes=0"])
    assert ConfigStore.instance().repo["schema_ppo.yaml"].node is stored
    assert OmegaConf.to_container(stored) == defaults
