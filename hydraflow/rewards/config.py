"""Configuration of rewards. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class CustomRewardConfig:
    """The user's own reward function."""

    path: str | None = None
    """Python file that holds it; null: the built-in functions, chosen by data.reward_fn_key."""
    name: str = "compute_score"
    """Its name: name(data_source, solution_str, ground_truth, extra_info, **reward_kwargs) -> float or dict with 'score'."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments that it gets besides."""


@dataclass
class RewardConfig:
    """How responses are scored."""

    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    num_workers: int = 1
    """Processes that score, each one row at a time."""
    timeout: float = 10.0
    """Seconds a row may take; a row that takes longer scores failure_score and is counted."""
    failure_score: float = 0.0
    """Score of a row whose function raised or took too long."""
