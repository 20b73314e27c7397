"""A configuration without problems, to be spoilt; and trees of keys that all have one origin."""

from __future__ import annotations

import functools
from typing import Any

from hydraflow.compose.tree import CheckedTree, check, nested
from hydraflow.compose.verl import Translation
from hydraflow.schema import PPOConfig


def valid() -> PPOConfig:
    config = PPOConfig()
    config.actor_rollout_ref.model.path, config.data.train_files = "model", ["train.parquet"]
    return config


def put(config: PPOConfig, key: str, value: Any) -> None:
    """Sets a key, whatever it was."""
    *sections, name = key.split(".")
    setattr(functools.reduce(getattr, sections, config), name, value)


def judged(tree: dict[str, Any], schema: type = PPOConfig, *, origin: str = "command line") -> CheckedTree:
    """What these keys come to."""
    return check(schema, nested(tree), dict.fromkeys(tree, origin), lambda key: None)


def translated(tree: dict[str, Any], schema: type = PPOConfig) -> tuple[dict[str, Any], Translation]:
    """What keys, all from the command line, come to: leaves of ours that were set, and what is said."""
    found = judged(tree, schema)
    return found.leaves, found.translation
