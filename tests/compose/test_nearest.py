"""Misspelt keys: the right one is among the first three suggestions."""

import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydraflow.compose.keys import known_keys, nearest_keys
from hydraflow.compose.nearest import nearest
from hydraflow.schema import PPOConfig

LEAVES = [key.path for key in known_keys(PPOConfig).values() if not key.is_section]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def letter(rng: random.Random, key: str) -> int:
    return rng.choice([position for position, char in enumerate(key) if char.isalpha()])


def swapped(rng: random.Random, key: str) -> str:
    places = [i for i in range(len(key) - 1) if key[i : i + 2].isalpha() and key[i] != key[i + 1]]
    at = rng.choice(places)
    return key[:at] + key[at + 1] + key[at] + key[at + 2 :]


def dropped(rng: random.Random, key: str) -> str:
    at = letter(rng, key)
    return key[:at] + key[at + 1 :]


def doubled(rng: random.Random, key: str) -> str:
    at = letter(rng, key)
    return key[:at] + key[at] + key[at:]


def wrong_letter(rng: random.Random, key: str) -> str:
    at = letter(rng, key)
    return key[:at] + rng.choice([char for char in LETTERS if char != key[at]]) + key[at + 1 :]


def without_prefix(rng: random.Random, key: str) -> str:
    return key.partition(".")[2] or f"{key}s"


def in_a_wrong_section(rng: random.Random, key: str) -> str:
    name = key.rpartition(".")[2]
    sections = sorted({other.rpartition(".")[0] for other in LEAVES} - {""})
    return rng.choice([f"{section}.{name}" for section in sections if f"{section}.{name}" not in LEAVES])


def with_dashes(rng: random.Random, key: str) -> str:
    return key.replace("_", "-") if "_" in key else key.replace(".", "_", 1)


def in_capitals(rng: random.Random, key: str) -> str:
    return "".join(part.capitalize() for part in key.split("_"))


KINDS: list[Callable[[random.Random, str], str]] = [
    swapped,
    dropped,
    doubled,
    wrong_letter,
    without_prefix,
    in_a_wrong_section,
    with_dashes,
    in_capitals,
]


def typos(seed: int, count: int) -> list[tuple[str, str]]:
    """(typo, key) of that many keys, every kind in turn."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        key = rng.choice(LEAVES)
        typo = KINDS[len(found) % len(KINDS)](rng, key)
        if typo not in LEAVES:
            found.append((typo, key))
    return found


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_of_a_hundred_typos_ninety_five_are_answered_with_the_right_key(seed):
    start = time.process_time()
    missed = [(typo, key) for typo, key in typos(seed, 100) if key not in nearest_keys(PPOConfig, typo)]
    assert len(missed) <= 5, missed
    assert time.process_time() - start < 5  # about 0.5 s


@given(st.sampled_from(LEAVES), st.data())
def test_one_wrong_letter_in_the_last_name_finds_the_key(key, data):
    """First, or beside one as near: clip_ratio_q is one letter from clip_ratio_c and from clip_ratio."""
    name = key.rpartition(".")[2]
    if len(name) < 8:
        return
    at = data.draw(
        st.sampled_from([len(key) - len(name) + i for i, char in enumerate(name) if char.isalpha()])
    )
    typo = key[:at] + "q" + key[at + 1 :]
    if typo != key:
        assert key in nearest_keys(PPOConfig, typo)[:2]


def test_what_resembles_nothing_gets_no_answer():
    assert nearest("zzz", ["data.shuffle", "trainer.seed"]) == []
    assert nearest("qwertyuiop.asdf", LEAVES) == []


def test_the_order_is_by_resemblance_not_by_place():
    keys = ["critic.optim.lr", "actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor.optim.eps"]
    assert nearest("actor.optim.lr", keys)[0] == "actor_rollout_ref.actor.optim.lr"
    assert nearest("critc.optim.lr", keys)[0] == "critic.optim.lr"


def test_a_long_section_does_not_make_other_last_names_similar():
    assert nearest("actor_rollout_ref.rollout.tp_size", ["actor_rollout_ref.rollout.top_k"]) == []
    assert nearest("actor_rollout_ref.rollouttop_k", ["actor_rollout_ref.rollout.top_k"]) != []


def test_a_name_in_another_section_is_nearer_than_one_that_only_contains_it():
    keys = ["reward.reward_model.model_path", "reward.judge.model"]
    assert nearest("actor.wrap_policy.model", keys) == ["reward.judge.model"]
