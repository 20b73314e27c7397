"""Configurations from overrides, and overrides back from the remedies of a report.

In: settings, or the text of a remedy. Out: a configuration with the origin of each key, a plan, or settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import yaml

from hydraflow.batch_plan.resolve import BatchPlan, resolve_plan
from hydraflow.errors import ConfigError, Problem
from hydraflow.schema import PPOConfig

Settings = Mapping[str, Any]
Config = TypeVar("Config")


def configured(settings: Settings, config: Config) -> Config:
    """`config` with these keys set."""
    for key, value in settings.items():
        *path, leaf = key.split(".")
        section: Any = config
        for name in path:
            section = getattr(section, name)
        assert hasattr(section, leaf), f"{key} is not a key"
        setattr(section, leaf, value)
    return config


def plan_of(settings: Settings, *, prompts: int | None = 1_000_000, **options: Any) -> BatchPlan:
    """The plan of a command line with these settings. Raises ConfigError."""
    return resolve_plan(
        configured(settings, PPOConfig()),
        prompts=prompts,
        origins=dict.fromkeys(settings, "command line"),
        **options,
    )


def refusal(settings: Settings, **options: Any) -> list[Problem]:
    """The problems of a command line; none where it has a plan."""
    try:
        plan_of(settings, **options)
    except ConfigError as error:
        return error.problems
    return []


def alternatives(problem: Problem) -> list[dict[str, Any]]:
    """What a remedy says: alternatives joined by " or ", the keys of one alternative by a space.

    >>> alternatives(Problem("a", 1, "...", "a=2 or b=null c=0-3"))
    [{'a': 2}, {'b': None, 'c': '0-3'}]
    """
    return [
        dict(_setting(word) for word in alternative.split()) for alternative in problem.remedy.split(" or ")
    ]


def _setting(word: str) -> tuple[str, Any]:
    key, equals, value = word.lstrip("+").partition("=")
    assert equals, f"not an override to paste: {word}"
    return key, yaml.safe_load(value)
