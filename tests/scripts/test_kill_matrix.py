"""What scripts/kill_matrix.py decides without a run: the moments that it draws, and its results."""

from __future__ import annotations

import dataclasses
import signal

import pytest
import torch

from scripts.kill_matrix import (
    GENERATION,
    METHODS,
    STEPS,
    TARGETS,
    Moment,
    Outcome,
    Result,
    differences,
    draw_chances,
    draw_generation,
    draw_moments,
    table,
)

FINE = Outcome(1, "raylet", "ppo", exit_code=3, ended_after=1.25, went_on_from=4, same=True)


def test_every_target_is_killed_with_every_method() -> None:
    moments = draw_moments(20, seed=1)
    assert [moment.number for moment in moments] == list(range(1, 21))
    assert {(moment.target, moment.method) for moment in moments} == {
        (target, method) for target in TARGETS for method in METHODS
    }


@pytest.mark.parametrize("seed", [1, 2])
def test_moments_lie_within_the_run(seed: int) -> None:
    for moment in draw_moments(200, seed):
        saves = moment.target == "middle of a save"
        assert 1 <= moment.steps < (STEPS / 2 if saves else STEPS), "it must not be over"
        assert moment.rank in ((-1, 0, 1) if saves else (0, 1)) and 0 <= moment.delay <= 0.25


def test_generation_processes_are_killed_where_they_have_devices_of_their_own() -> None:
    moments = draw_generation(20, seed=1)
    assert moments[:7] == draw_generation(7, seed=1) != draw_generation(7, seed=2)
    assert {(one.target, one.method) for one in moments} == {(GENERATION, "apart")}
    assert {one.rank for one in moments} == {0, 1} and all(1 <= one.steps < STEPS for one in moments)
    assert all(0 <= one.delay <= 0.5 for one in moments)


def test_a_seed_draws_the_same_moments_however_many() -> None:
    assert draw_moments(20, seed=1)[:7] == draw_moments(7, seed=1) != draw_moments(7, seed=2)
    assert draw_chances(20, seed=1)[:7] == draw_chances(7, seed=1) != draw_chances(7, seed=2)


def test_one_chance_in_four_is_in_the_first_half() -> None:
    chances = draw_chances(40, seed=1)
    assert [chance.number for chance in chances if chance.at < 0.5] == list(range(1, 41, 4))
    assert {chance.method for chance in chances} == set(METHODS)
    assert all(0 <= share < 1 for chance in chances for share in (chance.at, chance.kind, chance.which))


@pytest.mark.parametrize(
    ("target", "rank", "words"),
    [
        ("controller", 0, "controller after step 1 + 20 ms"),
        ("actor rank", 1, "actor rank 1 after step 1 + 20 ms"),
        (GENERATION, 0, "generation process 0 after step 1 + 20 ms"),
        ("middle of a save", 1, "rank 1 in the middle of save 2 + 20 ms"),
        ("middle of a save", -1, "controller in the middle of save 2 + 20 ms"),
    ],
)
def test_a_moment_in_words(target: str, rank: int, words: str) -> None:
    assert Moment(1, target, "ppo", steps=2, delay=0.02, rank=rank).words() == words


@pytest.mark.parametrize(
    ("change", "passed"),
    [
        ({}, True),
        ({"same": False, "differences": "step 5: actor/pg_loss"}, False),
        ({"fault": "left behind: raylet"}, False),
        ({"exit_code": 0, "went_on_from": 0}, True),
    ],
)
def test_it_passes_if_it_is_the_same_and_ended_as_it_should(change: dict, passed: bool) -> None:
    assert dataclasses.replace(FINE, **change).passed == passed


def test_the_table_says_how_each_ended() -> None:
    outcomes = [
        FINE,
        dataclasses.replace(FINE, exit_code=-signal.SIGKILL, went_on_from=0),
        dataclasses.replace(FINE, exit_code=0, fault="a stack trace", said="Error: x"),
        dataclasses.replace(FINE, same=False, differences="other weights"),
    ]
    head, line, *rows = table(outcomes).splitlines()
    assert head.count("|") == line.count("|") == 8
    assert rows == [
        "| 1 | ppo | raylet | 3 | 1.2 s | step 4 | yes |",
        "| 1 | ppo | raylet | SIGKILL | 1.2 s | the start | yes |",
        "| 1 | ppo | raylet | 0 | 1.2 s | it did not stop | yes; FAULT: a stack trace; Error: x |",
        "| 1 | ppo | raylet | 3 | 1.2 s | step 4 | NO: other weights |",
    ]


def test_differences_are_named() -> None:
    wanted = Result([(0, {"a": 1.0}), (1, {"a": 2.0, "b": 0.5})], {"actor/w": torch.ones(2)})
    assert list(differences(wanted, wanted)) == []
    short = dataclasses.replace(wanted, metrics=wanted.metrics[:1])
    assert list(differences(short, wanted)) == ["steps [0]"]
    other = Result([(0, {"a": 1.0}), (1, {"a": 2.5})], {"actor/w": torch.tensor([1.0, 1.0 + 2**-23])})
    assert list(differences(other, wanted)) == ["step 1: a, b", "1 of 1 tensors, the first actor/w"]
    assert list(differences(dataclasses.replace(wanted, weights={}), wanted)) == ["other weights"]
