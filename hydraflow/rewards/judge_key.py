"""The API key of the judge, which only the environment has. Standard library only: a process that loads the
functions looks for it before the first row."""

from __future__ import annotations

import os

from hydraflow.errors import ConfigError
from hydraflow.rewards.config import JudgeConfig


def require_key(judge: JudgeConfig) -> None:
    """ConfigError when there is to be a key, and its environment variable has none."""
    if judge.api_key_env is not None:
        key_of(judge.api_key_env)


def key_of(variable: str) -> str:
    """The key in an environment variable. ConfigError: there is none."""
    if key := os.environ.get(variable, "").strip():
        return key
    rule = "the environment has no such variable, or it is empty"
    remedy = f"export {variable}=... before the command, or reward.judge.api_key_env=null"
    raise ConfigError.one("reward.judge.api_key_env", variable, rule, remedy)
