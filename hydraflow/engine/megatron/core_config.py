"""Translates a Hugging Face configuration into Megatron-Core's TransformerConfig.

In: an `Architecture`, and the sizes of the engine. Out: a TransformerConfig, and rotary frequencies. Left out
on purpose: supported models (`architecture.py`), which arguments cannot be overridden (`core_arguments.py`),
layers per stage (`batch_plan/stages.py`), layers (`layers.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from hydraflow.batch_plan.stages import require_layers
from hydraflow.engine.config import MegatronConfig
from hydraflow.engine.megatron.architecture import Architecture, head_dim_of
from hydraflow.engine.megatron.core_arguments import OVERRIDES, fixed_arguments, require_free
from hydraflow.errors import ConfigError, shown
from hydraflow.models.config import ModelConfig


def transformer_config(
    shape: Architecture, model: ModelConfig, settings: MegatronConfig, dtype: torch.dtype, *, section: str
) -> TransformerConfig:
    """Megatron-Core's configuration of this model in this engine. Raises ConfigError for overrides of fixed
    arguments and for those that Megatron-Core rejects; `section`: the role's."""
    require_free(shape, settings, dtype, section=section)
    require_layers(shape.layers, settings, section=section)
    fixed, overrides = fixed_arguments(shape, settings, dtype), settings.override_transformer_config
    name = f"{section}.megatron.{OVERRIDES}"
    recomputes = settings.recomputes_layers(checkpointing=model.enable_gradient_checkpointing)
    by_layer = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    free: dict[str, Any] = by_layer if recomputes else {}
    try:
        return TransformerConfig(**fixed | free | overrides)
    except (ValueError, AssertionError, TypeError) as error:
        rule = f"Megatron-Core rejects it: {error}"
        raise ConfigError.one(name, shown(overrides), rule, f"{name}={{}}") from error


def frequencies(config: Any) -> tuple[torch.Tensor, float]:
    """(d / 2,) rotary frequencies, and the attention scaling of yarn, as transformers computes them. d:
    rotated columns of a head."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        dim = int(head_dim_of(config) * rope.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
