"""Configuration of the embedded recipes: data and models that are made on the spot. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RecipeConfig:
    """What is made before training; none: nothing, the user's files are used."""

    name: str = "none"
    """none or arithmetic."""
    cache_dir: str | None = None
    """Where made data and models are kept; null: $HYDRAFLOW_CACHE, else ~/.cache/hydraflow."""
    warm_start_steps: int = 250
    """Most supervised steps that the made model gets."""
    warm_start_accuracy: float = 0.42
    """Held-out accuracy at which the supervised steps end."""
    train_problems: int = 9000
    """Training problems."""
    val_problems: int = 500
    """Held-out problems; none of them is a training problem."""
