"""Which random draws the prompts of a step get from `Lockstep`: those of their epoch, whatever the step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from data.test_loader import loader, numbers

from hydraflow.data.loader import PromptLoader
from hydraflow.protocol.batch import DataProto
from hydraflow.trainer.source import Lockstep

Asked = list[tuple[list[int], int]]
"""Prompts and visit of each call of the sampler."""


def lockstep(prompts: PromptLoader, asked: Asked, **more: int) -> Lockstep:
    def sample(batch: DataProto, visit: int) -> None:
        asked.append((numbers(batch), visit))

    sampler: Any = SimpleNamespace(sample=sample)
    return Lockstep(prompts, sampler, **more)


def test_the_visit_is_the_epoch_of_the_prompts_whatever_the_step() -> None:
    """Six prompts, three a step; a step that was abandoned, and a resumed run, get the same again."""
    asked: Asked = []
    source = lockstep(loader(rows=6), asked)
    for step in (5, 6, 9, 10):
        before = source.state()
        source.take(step)
    assert [visit for _, visit in asked] == [0, 0, 1, 1]
    assert sorted(asked[0][0] + asked[1][0]) == sorted(asked[2][0] + asked[3][0]) == list(range(6))
    source.give_back()
    source.take(10)
    resumed = lockstep(loader(rows=6), asked)
    resumed.load_state(before)
    resumed.take(1)
    assert asked[3] == asked[4] == asked[5]


def test_held_out_prompts_have_a_visit_of_their_own() -> None:
    asked: Asked = []
    source = lockstep(loader(rows=6, shuffle=False), asked, visit=-1)
    for _ in range(3):
        source.take(0)
    assert asked == [([0, 1, 2], -1), ([3, 4, 5], -1), ([0, 1, 2], -1)]
