"""Configuration of the embedded recipes: data and models that are made on the spot. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from hydraflow.options import Switch, option


@dataclass
class RecipeConfig:
    """What is made before training; none: nothing, the user's files are used."""

    name: str = option(
        "none",
        choices=("none", "arithmetic"),
        switch=Switch(off="none", remedy="{s}=arithmetic", why="recipe=none makes nothing"),
    )
    """none or arithmetic."""
    cache_dir: str | None = option(None, shapes_training=False)
    """Where made data and models are kept; null: $HYDRAFLOW_CACHE, else ~/.cache/hydraflow."""
    warm_start_steps: int = option(250, ge=0)
    """Most supervised steps that the made model gets."""
    warm_start_accuracy: float = option(0.42, ge=0, le=1)
    """Held-out accuracy at which the supervised steps end."""
    train_problems: int = option(9000, ge=1)
    """Training problems."""
    val_problems: int = option(500, ge=1)
    """Held-out problems; none of them is a training problem."""
