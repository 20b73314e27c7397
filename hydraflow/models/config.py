"""Configuration of a model. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModelSourceConfig:
    """A Hugging Face model directory and how it is opened."""

    path: str | None = None
    """Directory with config.json, weights and tokenizer, or a hub name; for the critic null means the
    actor's."""
    tokenizer_path: str | None = None
    """Where the tokenizer is; null: with the model."""
    custom_chat_template: str | None = None
    """Jinja chat template used instead of the tokenizer's own."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Values that replace those of config.json."""


@dataclass
class ModelConfig(ModelSourceConfig):
    """A model that is trained, or that a trained one is compared with."""

    use_remove_padding: bool = True
    """Pack rows without padding, where the model allows it."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, about a third more time."""
    lora_rank: int = 0
    """Rank of low-rank adapters; 0 trains all weights."""
    lora_alpha: int = 16
    """Scale of the adapters: their output is multiplied by lora_alpha / lora_rank."""
    target_modules: Any = "all-linear"
    """Modules that get adapters: all-linear, or a list of names."""
