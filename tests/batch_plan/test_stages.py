"""Layers of pipeline stages: what is legal, and what is said before anything starts. That Megatron-Core
divides in the same way is tested with it (tests/engine/test_megatron_config.py)."""

from __future__ import annotations

from typing import Any

import pytest

from hydraflow.batch_plan.stages import layers_of_parts, require_layers, stage_problems
from hydraflow.engine.config import MegatronConfig
from hydraflow.errors import ConfigError
from hydraflow.schema import PPOConfig

ENGINE = "critic.megatron"
KEY = f"{ENGINE}.override_transformer_config"
FIRST, LAST, LAYOUT = (
    *(f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last")),
    "pipeline_model_parallel_layout",
)


EMBEDDING, LOSS = (f"account_for_{end}_in_pipeline_split" for end in ("embedding", "loss"))


def settings(stages: int, overrides: dict[str, Any], chunks: int | None = None) -> MegatronConfig:
    return MegatronConfig(
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
        override_transformer_config=overrides,
    )


def problems(layers: int, stages: int, overrides: dict[str, Any], chunks: int | None = None) -> list[str]:
    """`key: rule -> remedy` without the section."""
    try:
        require_layers(layers, settings(stages, overrides, chunks), section="critic")
    except ConfigError as error:
        found = [f"{one.field}: {one.rule} -> {one.remedy}" for one in error.problems]
        return [one.replace(f"{KEY}.", "").replace(f"{ENGINE}.", "") for one in found]
    return []


@pytest.mark.parametrize(
    ("layers", "stages", "overrides", "chunks", "parts"),
    [
        (8, 4, {}, None, [[2], [2], [2], [2]]),
        (61, 8, {FIRST: 7, LAST: 6}, None, [[7], *[[8]] * 6, [6]]),
        (10, 2, {FIRST: 4}, 2, [[2, 2], [3, 3]]),
        (7, 2, {EMBEDDING: True}, None, [[3], [4]]),
        (6, 2, {EMBEDDING: True, LOSS: True}, 2, [[1, 2], [2, 1]]),
        (4, 2, {LAYOUT: "Et|t*3L"}, None, [[1], [3]]),
        (5, 2, {LAYOUT: [["embedding", "decoder"], ["decoder"], ["decoder"], ["decoder"] * 2 + ["loss"]]}, 2,
         [[1, 1], [1, 2]]),
        (4, 2, {FIRST: None, LOSS: False}, None, [[2], [2]]),
    ],
)  # fmt: skip
def test_layers_of_parts(
    layers: int, stages: int, overrides: dict[str, Any], chunks: int | None, parts: list[list[int]]
) -> None:
    assert problems(layers, stages, overrides, chunks) == []
    assert layers_of_parts(layers, settings(stages, overrides, chunks)) == parts


def test_every_wrong_number_is_named_with_legal_ones() -> None:
    rule = "gives the 4 stages 9, 4, 4, 4 of the model's 22 layers"
    assert problems(22, 4, {FIRST: 9}) == [f"{FIRST}: {rule} -> {FIRST}=10 or {FIRST}=7"]
    rule = "gives the 4 stages 3, 8, 8, 2 of the model's 22 layers"
    assert problems(22, 4, {FIRST: 3, LAST: 2}) == [
        f"{FIRST}: {rule} -> {FIRST}=2 or {FIRST}=4",
        f"{LAST}: {rule} -> {LAST}=1 or {LAST}=3",
    ]


@pytest.mark.parametrize("wrong", [0, -1, 22, "three"])
def test_a_stage_without_layers_or_with_no_number(wrong: Any) -> None:
    [found] = problems(22, 2, {FIRST: wrong})
    assert "gives the 2 stages" in found and f"{FIRST}=" in found.partition("->")[2]


def test_parts_of_stages_must_be_equal() -> None:
    [found] = problems(10, 2, {FIRST: 5}, 2)
    assert found.endswith(
        f"each of which must be divisible by the 2 parts of a stage -> {FIRST}=4 or {FIRST}=6"
    )


def test_counted_ends() -> None:
    name = EMBEDDING
    [found] = problems(8, 2, {name: True})
    rule = "with it 9 layers must divide evenly into 2 stages, and every part must have a layer"
    sizes = "pipeline_model_parallel_size=1 or pipeline_model_parallel_size=3"
    assert found == f"{name}: {rule} -> {sizes} or leave out {name}"


@pytest.mark.parametrize(
    ("layout", "rules"),
    [
        ("Et|tL", ["gives its parts 1, 1 of the model's 4 layers, and each needs at least one"]),
        ("Et*2|t*2|L", ["has 3 parts for 2 stages",
                        "gives its parts 2, 2, 0 of the model's 4 layers, and each needs at least one"]),
        ("t*2|t*2L", ["must begin with its one embedding and end with its one loss"]),
        ("Et*2|t*2mL", ["has m; only E, t and L (embedding, decoder, loss) are implemented here"]),
    ],
)  # fmt: skip
def test_layouts(layout: str, rules: list[str]) -> None:
    assert problems(4, 2, {LAYOUT: layout}) == [f"{LAYOUT}: {rule} -> {LAYOUT}='Et*2|t*2L'" for rule in rules]


@pytest.mark.parametrize("layout", ["Et*99999999999L", "E(t|)*99999999999L", f"Et*{'9' * 5000}L"])
def test_a_layout_of_more_layers_than_memory_holds(layout: str) -> None:
    assert problems(4, 2, {LAYOUT: layout})


def test_two_ways_at_once() -> None:
    assert problems(4, 2, {LAYOUT: "Et*2|t*2L", FIRST: 2}) == [
        f"{FIRST}: {LAYOUT} already divides the layers -> leave out {FIRST}"
    ]


def test_all_roles_are_judged_at_once_and_a_follower_once() -> None:
    config = PPOConfig()
    config.critic.enable, config.actor_rollout_ref.actor.use_kl_loss = True, True
    for section, first in ((config.actor_rollout_ref.actor, 9), (config.critic, 7)):
        section.strategy, section.megatron = "megatron", settings(2, {FIRST: first})
    config.actor_rollout_ref.ref.megatron = settings(2, {FIRST: 9})
    fields = [one.field for one in stage_problems(config, policy=9, critic=7)]
    assert fields == [
        f"{role}.megatron.override_transformer_config.{FIRST}"
        for role in ("actor_rollout_ref.actor", "critic")
    ]
    config.actor_rollout_ref.ref.megatron = settings(3, {FIRST: 8})
    assert len(stage_problems(config, policy=9, critic=7)) == 3
    assert stage_problems(config, policy=None, critic=None) == []
