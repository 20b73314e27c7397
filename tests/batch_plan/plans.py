"""Small configurations for the tests of the plan."""

from __future__ import annotations

from typing import Any

import pytest

from hydraflow.batch_plan.resolve import BatchPlan, resolve_plan
from hydraflow.errors import ConfigError, Problem
from hydraflow.schema import PPOConfig

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"


def configured(schema: Any = PPOConfig, **values: Any) -> Any:
    """A configuration with `section__key=value` set; `actor`, `rollout` and `ref` stand for their whole
    path."""
    config = schema()
    for name, value in values.items():
        *sections, key = name.split("__")
        target = (
            config.actor_rollout_ref if sections and sections[0] in ("actor", "rollout", "ref") else config
        )
        for section in sections:
            target = getattr(target, section)
        assert hasattr(target, key), name
        setattr(target, key, value)
    return config


def small(**values: Any) -> PPOConfig:
    """GRPO with Q=64, n=8, M=32, P=16, R=8."""
    base = dict(
        data__train_batch_size=64,
        rollout__n=8,
        actor__ppo_mini_batch_size=32,
        algorithm__adv_estimator="grpo",
    )
    return configured(**(base | dict(data__max_prompt_length=16, data__max_response_length=8) | values))


def resolve(config: PPOConfig, *, devices: int = 2, prompts: int | None = 9000, **options: Any) -> BatchPlan:
    return resolve_plan(config, devices_per_node=devices, prompts=prompts, **options)


def broken(config: PPOConfig, **options: Any) -> dict[str, Problem]:
    """The problems by key."""
    with pytest.raises(ConfigError) as caught:
        resolve(config, **options)
    return {problem.field: problem for problem in caught.value.problems}
