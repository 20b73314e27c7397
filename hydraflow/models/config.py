"""Configuration of a model. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydraflow.options import MODULES, idle_when, option

NO_ADAPTERS = idle_when(lambda s: s.lora_rank == 0, "{s}.lora_rank=0: no adapters", "{s}.lora_rank=8")


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
    trust_remote_code: bool = option(False, shapes_training=False)
    """Run Python code that comes with the model."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Values that replace those of config.json."""


@dataclass
class ModelConfig(ModelSourceConfig):
    """A model that is trained, or that a trained one is compared with."""

    use_remove_padding: bool = option(True, shapes_training=False)
    """Pack rows without padding, where the model allows it."""
    enable_gradient_checkpointing: bool = option(True, shapes_training=False)
    """Recompute activations in the backward pass: less memory, about a third more time."""
    lora_rank: int = option(0, ge=0)
    """Rank of low-rank adapters; 0 trains all weights."""
    lora_alpha: int = option(16, ge=1, idle=NO_ADAPTERS)
    """Scale of the adapters: their output is multiplied by lora_alpha / lora_rank."""
    target_modules: Any = option("all-linear", rule=MODULES, idle=NO_ADAPTERS)
    """Modules that get adapters: all-linear, or a list of names."""
