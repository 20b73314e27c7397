"""Where the shape of a model comes from: a folder, the hub's cache, overrides, the recipe."""

import json
from pathlib import Path

import pytest

from hydraflow.errors import ConfigError
from hydraflow.explain.models import find_models
from hydraflow.models.cache import cached_snapshot
from hydraflow.models.tiny import config_values
from hydraflow.schema import PPOConfig

VALUES = config_values(100, hidden=64, layers=4, heads=4, kv_heads=2)


def named(path: str | None) -> PPOConfig:
    config = PPOConfig()
    config.algorithm.adv_estimator = "grpo"
    config.actor_rollout_ref.model.path = path
    return config


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VALUES))
    found = find_models(named(str(tmp_path)))
    assert found.policy is not None and (found.policy.layers, found.policy.kv_heads) == (4, 2)
    assert not found.notes


def test_a_name_whose_files_were_downloaded_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(VALUES))
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("abc")
    real = huggingface_hub.try_to_load_from_cache
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda *names: real(*names, cache_dir=tmp_path)
    )
    assert cached_snapshot("some/model") == snapshot
    assert cached_snapshot("some/other") is None
    found = find_models(named("some/model"))
    assert found.policy is not None and found.policy.layers == 4


def test_overrides_stand_for_a_model_that_is_elsewhere() -> None:
    config = named("/cluster/model")
    assert find_models(config).policy is None
    (note,) = find_models(config).notes
    assert "/cluster/model has no config.json on this machine" in note and "num_hidden_layers" in note
    config.actor_rollout_ref.model.override_config = VALUES
    found = find_models(config)
    assert found.policy is not None and found.policy.hidden == 64 and not found.notes


def test_a_critic_of_its_own_is_looked_for() -> None:
    config = named(None)
    config.algorithm.adv_estimator = "gae"
    config.critic.model.path = "/cluster/critic"
    assert [note.partition(":")[0] for note in find_models(config).notes] == [
        "actor_rollout_ref.model.path",
        "critic.model.path",
    ]


def test_a_broken_file_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        find_models(named(str(tmp_path)))


def test_the_recipe_knows_its_model(tiny: str) -> None:
    """Sizes that a plan uses without transformers are those that the made model has."""
    found = json.loads((Path(tiny) / "config.json").read_text())
    values = config_values(found["vocab_size"], hidden=32, layers=2, heads=2, kv_heads=1)
    assert {name: found[name] for name in values} == values
    config = named(None)
    config.recipe.name = "arithmetic"
    shape = find_models(config).policy
    assert shape is not None and (shape.vocabulary, shape.hidden, shape.layers) == (
        found["vocab_size"],
        128,
        3,
    )


@pytest.mark.parametrize("path", ["not a name", "org/name@x", "a/b/c/d", "name.", "~/model", "."])
def test_a_path_that_can_be_no_model_is_only_noted(path: str) -> None:
    found = find_models(named(path))
    assert found.policy is None and len(found.notes) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", "cannot be read"),
        (b"[1]", "holds no mapping"),
        (b"{", "cannot be read"),
        (
            json.dumps(VALUES | {"num_attention_heads": 0}).encode(),
            "num_attention_heads=0: must be a whole number above 0",
        ),
        (
            json.dumps(VALUES | {"num_key_value_heads": "two"}).encode(),
            "num_key_value_heads=two: must be a whole number above 0",
        ),
        (
            json.dumps(VALUES | {"num_experts": 2.5}).encode(),
            "num_experts=2.5: must be a whole number above 0",
        ),
    ],
)
def test_a_config_json_that_is_here_and_broken_is_a_problem(
    content: bytes, words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        find_models(named(str(tmp_path)))
