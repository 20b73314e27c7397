"""A configuration without problems, to be spoilt."""

from __future__ import annotations

import functools
from typing import Any

from hydraflow.schema import PPOConfig


def valid() -> PPOConfig:
    config = PPOConfig()
    config.actor_rollout_ref.model.path, config.data.train_files = "model", ["train.parquet"]
    return config


def put(config: PPOConfig, key: str, value: Any) -> None:
    """Sets a key, whatever it was."""
    *sections, name = key.split(".")
    setattr(functools.reduce(getattr, sections, config), name, value)
