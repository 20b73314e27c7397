"""The schema's keys: types, nearest names, documentation."""

from typing import Any

import pytest

from hydraflow.compose.keys import accepts, fitted, known_keys, nearest_keys, type_words, unknown_key
from hydraflow.compose.tree import check, value_problems
from hydraflow.compose.verl import suggested
from hydraflow.schema import EvalConfig, GenerateConfig, PPOConfig, SFTConfig


@pytest.mark.parametrize("schema", [PPOConfig, SFTConfig, GenerateConfig, EvalConfig])
def test_every_leaf_says_what_it_changes(schema):
    silent = [key.path for key in known_keys(schema).values() if not key.is_section and not key.doc]
    assert [path for path in silent if not path.endswith(("optim", "fsdp_config"))] == []


def test_inherited_fields_keep_the_documentation_of_their_class():
    keys = known_keys(PPOConfig)
    assert keys["trainer.nnodes"].doc == "Number of machines."
    assert keys["trainer.critic_warmup"].doc.startswith("Critic warm-up")


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (int, [3], [3.0, "${a.b}", "3", True, None, [3]]),
        (float, [3, 3.5], ["x", True, None]),
        (bool, [True], [1, "yes"]),
        (str, ["x", 5, 0.5], [True, None, ["x"]]),
        (int | None, [3, None], ["x", 1.5]),
        (list[float], [[1, 0.5], []], [1, [None], ["x"], {"a": 1}]),
        (dict[str, Any], [{"a": [1]}], [1, [1]]),
        (Any, [1, None, [1], {"a": 1}], []),
    ],
)
def test_types(hint, good, bad):
    assert all(accepts(hint, value) for value in good)
    assert not any(accepts(hint, value) for value in bad)


def test_a_value_gets_the_type_that_it_stands_for():
    assert [
        type(fitted(float, 1)),
        type(fitted(str, 0.5)),
        type(fitted(int | None, 3)),
        fitted(float | None, None),
    ] == [float, str, int, None]
    assert fitted(list[str], [1, "a"]) == ["1", "a"]
    assert fitted(Any, 1) == 1 and fitted(dict[str, Any], {"a": 1}) == {"a": 1}


def test_types_in_words():
    assert type_words(bool) == "true or false"
    assert type_words(float | None) == "a number or null"
    assert type_words(list[str]) == "a list of text"


def test_nearest_keys_by_whole_path_and_by_last_name():
    assert nearest_keys(PPOConfig, "data.train_bach_size")[0] == "data.train_batch_size"
    assert set(nearest_keys(PPOConfig, "optim.lr")) == {"critic.optim.lr", "actor_rollout_ref.actor.optim.lr"}
    assert nearest_keys(PPOConfig, "zzz") == []
    assert len(nearest_keys(PPOConfig, "ppo_micro_batch_size_per_gp")) == 3
    ours = {f"{section}.ppo_micro_batch_size_per_gpu" for section in ("actor_rollout_ref.actor", "critic")}
    assert set(nearest_keys(PPOConfig, "ppo_micro_batch_size_per_gpu")) == ours, "only those of that name"


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("actor_rollout_ref.rollout.nme", "vllm", "actor_rollout_ref.rollout.name=vllm"),
        ("data.train_bach_size", "many", "data.train_batch_size=<a whole number>"),
        ("trainer.critic_warmp", 1e3, "trainer.critic_warmup=1000.0"),
        ("trainer.val_before_trian", "no", "trainer.val_before_train=no"),
        ("teachers.math", "/path", "distillation.teachers.math=/path"),
        (
            "data.apply_chat_template_kwarg.enable_thinking",
            False,
            "data.apply_chat_template_kwargs.enable_thinking=false",
        ),
    ],
)
def test_the_keys_suggested_take_the_value(key, value, remedy):
    assert suggested(PPOConfig, unknown_key(PPOConfig, key, value), value).remedy.split(" or ")[0] == remedy


def test_no_key_is_suggested_that_does_not_take_the_value():
    problem = unknown_key(PPOConfig, "actor_rollout_ref.rollout.nme", "vllm")
    assert problem.remedy == "actor_rollout_ref.rollout.name=vllm"
    problem = unknown_key(PPOConfig, "actor_rollout_ref.rollout.nme", 4)
    assert problem.remedy == "actor_rollout_ref.rollout.n=4"


def test_a_tree_is_checked_whole():
    tree = {
        "data": {"train_bach_size": 3, "shuffle": "maybe"},
        "new": 1,
        "trainer": 5,
        "critic": {"optim": {"lr": "x"}},
    }
    judged = check(PPOConfig, tree, {}, lambda key: None)
    assert {problem.field for problem in judged.problems} == {
        "data.train_bach_size",
        "data.shuffle",
        "new",
        "trainer",
        "critic.optim.lr",
    }


def test_only_open_mappings_have_unknown_keys_below():
    assert value_problems(PPOConfig, "actor_rollout_ref.model.override_config.rope.theta", 1) == []
    assert value_problems(PPOConfig, "trainer.seed.x", 1)[0].rule == "must be a whole number, not a mapping"


def test_the_remedy_for_a_whole_float_is_the_number():
    assert value_problems(PPOConfig, "data.train_batch_size", 1e3)[0].remedy == "data.train_batch_size=1000"
