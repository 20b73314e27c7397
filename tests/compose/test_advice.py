"""Legal values that are hardly meant are noted; usual ones are not."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from jobs.command import hydraflow

from hydraflow.compose import advice as module
from hydraflow.compose.advice import advice
from hydraflow.schema import PPOConfig, SFTConfig

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def configured(**values: Any) -> PPOConfig:
    """A usual configuration with these values; `__` in a key is a dot."""
    config = PPOConfig()
    usual = {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 8, "trainer.device": "cpu"}
    for key, value in (usual | {key.replace("__", "."): value for key, value in values.items()}).items():
        *sections, name = key.split(".")
        setattr(reduce(getattr, sections, config), name, value)
    return config


def notes(**values: Any) -> list[str]:
    return list(advice(configured(**values), planning=False))


def test_a_usual_configuration_has_none() -> None:
    assert notes() == []
    assert list(advice(SFTConfig(), planning=False)) == []


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (f"{ROLLOUT}.n", 1, "grpo compares the responses to a prompt"),
        (f"{ACTOR}.optim.lr", 0.0, "no weight will change"),
        (f"{ACTOR}.optim.lr", 1e6, "destroy the weights"),
        (f"{ACTOR}.clip_ratio", 1.0, "nothing is clipped from below"),
        (f"{ACTOR}.clip_ratio_low", 1.5, "nothing is clipped from below"),
        (f"{ACTOR}.entropy_coeff", -5.0, "rewards low entropy"),
    ],
)
def test_each_is_one_note_that_names_key_and_value(key: str, value: float, words: str) -> None:
    [note] = notes(**{key.replace(".", "__"): value})
    assert note.startswith(f"{key}={value:g}: ") and words in note and f"{key}=" in note.partition("; ")[2]


def test_what_is_usual_elsewhere_is_not_noted() -> None:
    assert notes(**{"algorithm__adv_estimator": "gae", "actor_rollout_ref__rollout__n": 1}) == []
    assert notes(actor_rollout_ref__actor__optim__lr=1.0) == []
    assert notes(actor_rollout_ref__actor__clip_ratio=1.5, actor_rollout_ref__actor__clip_ratio_low=0.2) == []
    for loss in ("cispo", "dppo_tv", "geo_mean", "sapo"):  # none has the bound 1 - clip_ratio_low of PPO
        low = {f"{ACTOR}.policy_loss.loss_mode": loss, f"{ACTOR}.clip_ratio_low": 10.0}
        assert notes(**low) == [], loss
    assert notes(critic__optim__lr=0.0) == [], "there is no critic"
    assert len(notes(algorithm__adv_estimator="gae", critic__optim__lr=0.0)) == 1
    assert notes(actor_rollout_ref__rollout__n=1, batch__trajectories_per_step=64) == []


@pytest.mark.parametrize(
    ("mode", "in_advantages", "words"),
    [
        ("k1", False, "its expected gradient is 0"),
        ("k3", True, "its policy gradient is not that of the KL"),
        ("k2+", True, "its policy gradient is not that of the KL"),
        ("k1", True, None),
        ("kl+", True, None),
        ("k1+", False, None),
        ("k3", False, None),
        ("reverse_kl", False, None),
    ],
)
def test_an_estimate_that_teaches_nothing(mode: str, in_advantages: bool, words: str | None) -> None:
    key = "distillation__distillation_loss"
    given = {f"{key}__loss_mode": mode, f"{key}__use_policy_gradient": in_advantages}
    found = notes(distillation__enabled=True, **given)
    if words is None:
        assert found == []
    else:
        [note] = found
        assert note.startswith(f"{key.replace('__', '.')}.loss_mode={mode}: ") and words in note
    assert notes(**given) == [], "there is no teacher"


def test_a_rank_is_compared_with_the_hidden_size_where_that_is_known(tmp_path: Path) -> None:
    key = "actor_rollout_ref__model__"
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    [note] = notes(**{f"{key}lora_rank": 65, f"{key}path": str(tmp_path)})
    assert note.startswith("actor_rollout_ref.model.lora_rank=65: is more than the model's hidden size 64")
    assert notes(**{f"{key}lora_rank": 64, f"{key}path": str(tmp_path)}) == []
    assert len(notes(**{f"{key}lora_rank": 9, f"{key}override_config": {"hidden_size": 8}})) == 1
    assert notes(**{f"{key}lora_rank": 16384, f"{key}path": "somewhere/else"}) == []
    [note] = notes(**{f"{key}lora_rank": 10**5, f"{key}path": "somewhere/else"})
    assert "is more than the hidden size of any model" in note


def test_more_processes_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    monkeypatch.setattr(module, "listed_gpus", lambda: 0)
    [note] = notes(trainer__n_gpus_per_node=8)
    assert note.startswith("trainer.n_gpus_per_node=8: ") and "this machine has 2 cores" in note
    assert notes(trainer__n_gpus_per_node=2) == []
    auto = configured(trainer__n_gpus_per_node=8, trainer__device="auto")
    assert len(list(advice(auto, planning=False))) == 1
    assert list(advice(auto, planning=True)) == [], "a plan may be for another machine"
    monkeypatch.setattr(module, "listed_gpus", lambda: 8)
    assert list(advice(auto, planning=False)) == []


def test_they_are_among_the_notes_of_a_command(tmp_path: Path) -> None:
    done = hydraflow("plan", f"{ACTOR}.optim.lr=0", "trainer.device=cpu", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)["notes"]
    assert [note for note in found if note.startswith(f"{ACTOR}.optim.lr=0: no weight will change")]
