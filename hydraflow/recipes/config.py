"""Configuration of the embedded recipes, which generate data and train a model. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from hydraflow.options import Beside, Switch, free, option

PROBLEMS = 100 * 100
"""Number of sums of two numbers of two digits."""


@dataclass
class RecipeConfig:
    """Data and model generated on this machine; none: your own files."""

    name: str = option(
        "none",
        choices=("none", "arithmetic"),
        switch=Switch(off="none", remedy="{s}=arithmetic", why="recipe=none makes nothing"),
    )
    """Recipe. arithmetic: sums, and a model of 0.6 M parameters."""
    cache_dir: str | None = free(None)
    """Cache of generated data and models; null: $HYDRAFLOW_CACHE, else ~/.cache/hydraflow."""
    warm_start_steps: int = option(500, ge=1)
    """Maximum supervised steps before reinforcement learning."""
    warm_start_accuracy: float = option(0.42, ge=0, le=1)
    """Held-out accuracy at which the supervised steps stop."""
    train_problems: int = option(
        9000,
        ge=1,
        beside=Beside(
            lambda value, section: value + section.val_problems <= PROBLEMS,
            f"and {{s}}.val_problems={{val_problems}} must be at most {PROBLEMS} together",
            "{s}.train_problems=9000 {s}.val_problems=500",
        ),
    )
    """Number of training problems."""
    val_problems: int = option(500, ge=1)
    """Number of held-out problems; none of them is a training problem."""
