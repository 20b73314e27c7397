"""Configuration of a model. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydraflow.options import MODULE_NAMES, MODULES, free, no_effect_when, option

NO_ADAPTERS = no_effect_when(lambda s: s.lora_rank == 0, "{s}.lora_rank=0: no adapters", "{s}.lora_rank=8")


@dataclass
class ModelSourceConfig:
    """A Hugging Face model and how it is loaded."""

    path: str | None = None
    """Directory with config.json, weights and tokenizer, or a hub name; null, for the critic: the actor's."""
    tokenizer_path: str | None = None
    """Path of the tokenizer; null: the model's."""
    custom_chat_template: str | None = None
    """Jinja chat template that replaces the tokenizer's own."""
    trust_remote_code: bool = free(False)
    """Allow Python code that comes with the model to run."""
    external_lib: Any = free(None, rule=MODULE_NAMES)
    """Python module, or a list of them, that every process imports before it builds the model; null: none."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Overrides of config.json."""


@dataclass
class ModelConfig(ModelSourceConfig):
    """A model that is trained, or the reference it is compared with."""

    use_remove_padding: bool = free(True)
    """Pack rows without padding (sequence packing), if the model supports it."""
    enable_gradient_checkpointing: bool = free(True)
    """Activation checkpointing: recompute activations in the backward pass; less memory, about a third more
    time."""
    lora_rank: int = option(0, ge=0)
    """LoRA rank; 0 trains all weights."""
    lora_alpha: int = option(16, ge=1, no_effect=NO_ADAPTERS)
    """LoRA alpha: the adapters' output is scaled by lora_alpha / lora_rank."""
    target_modules: Any = option("all-linear", rule=MODULES, no_effect=NO_ADAPTERS)
    """LoRA target modules: all-linear, or a list of names."""


@dataclass
class AdapterConfig:
    """How LoRA adapters reach the generation engine."""

    merge: bool = free(True)
    """Merge LoRA adapters into the weights that are sent to the generation engine; false: send the base
    weights once and then only the adapters, which the engine applies itself."""


@dataclass
class PolicyModelConfig(ModelConfig):
    """The model that is trained and sampled from."""

    lora: AdapterConfig = field(default_factory=AdapterConfig)
