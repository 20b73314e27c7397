"""A Hugging Face configuration in Megatron-Core's words.

In: an `Architecture`, and the sizes of the engine. Out: a TransformerConfig, and rotary frequencies. Left out
on purpose: which models there are (`architecture.py`), layers (`layers.py`).
"""

from __future__ import annotations

from dataclasses import fields
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from hydraflow.engine.config import MegatronConfig
from hydraflow.engine.megatron.architecture import Architecture, Mixture
from hydraflow.errors import ConfigError, Problem, shown
from hydraflow.models.config import ModelConfig


def transformer_config(
    shape: Architecture, model: ModelConfig, settings: MegatronConfig, dtype: torch.dtype, *, section: str
) -> TransformerConfig:
    """Megatron-Core's configuration of this model on this engine. Raises ConfigError for overrides that are
    not the user's to make, or that Megatron-Core refuses; `section`: the role's."""
    fixed = _defaults() | _of_model(shape) | _of_engine(settings, dtype)
    if shape.mixture is not None:
        if settings.moe_permute_fusion and find_spec("transformer_engine") is None:
            key = f"{section}.megatron.moe_permute_fusion"
            raise ConfigError.one(key, True, "Transformer Engine is not installed", f"{key}=false")
        fixed |= _of_mixture(shape.mixture, settings)
    name, overrides = f"{section}.megatron.override_transformer_config", settings.override_transformer_config
    _require_free(name, overrides, fixed, settings)
    free: dict[str, Any] = dict.fromkeys(_FUSIONS, False)
    whole = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    if model.enable_gradient_checkpointing and (whole | overrides)["recompute_granularity"] == "full":
        free |= whole
    try:
        found = TransformerConfig(**fixed | free | overrides)
        counts = layers_of_stages(found, settings)
    except (ValueError, AssertionError, TypeError) as error:
        rule = f"Megatron-Core refuses it: {error}"
        raise ConfigError.one(name, shown(overrides), rule, f"{name}={{}}") from error
    if min(counts) < 1 or sum(counts) != shape.layers:
        rule = f"gives the stages {', '.join(map(str, counts))} of the model's {shape.layers} layers"
        raise ConfigError.one(name, shown(overrides), rule, f"{name}={{}}")
    return found


def layers_of_stages(config: TransformerConfig, settings: MegatronConfig) -> list[int]:
    """How many layers each pipeline stage has."""
    chunks = range(settings.chunks) if settings.chunks > 1 else (None,)
    stages = range(settings.pipeline_model_parallel_size)
    return [sum(get_num_layers_to_build(config, chunk, stage) for chunk in chunks) for stage in stages]


def _require_free(
    name: str, overrides: dict[str, Any], fixed: dict[str, Any], settings: MegatronConfig
) -> None:
    """ConfigError for overrides that say something else than the model and other keys."""
    problems = []
    for key in sorted(fixed.keys() & overrides.keys()):
        if overrides[key] != fixed[key]:
            own = f"{name.rpartition('.')[0]}.{key}={shown(overrides[key])}"
            remedy = own if hasattr(settings, key) else f"leave out {name}.{key}"
            rule = "follows from the model and from other keys"
            problems.append(Problem(f"{name}.{key}", shown(overrides[key]), rule, remedy))
    if problems:
        raise ConfigError(problems)


_FUSIONS = (
    "masked_softmax_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "gradient_accumulation_fusion",
    "persist_layer_norm",
)
"""Kernels of Apex and Transformer Engine, which may not be there."""


_OF_OTHER_MODELS = (
    "num_moe_experts",
    "moe_layer_freq",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_force_load_balancing",
    "multi_latent_attention",
    "mtp_num_layers",
    "rotary_interleaved",
    "no_rope_freq",
    "softmax_scale",
    "window_size",
    "layernorm_zero_centered_gamma",
    "attention_softmax_in_fp32",
    "fp16",
    "fp8",
    "fp4",
)
"""What would change a model that is built here, or what its own layers do not read."""


def _defaults() -> dict[str, Any]:
    return {one.name: one.default for one in fields(TransformerConfig) if one.name in _OF_OTHER_MODELS}


def _of_model(shape: Architecture) -> dict[str, Any]:
    return dict(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.norm_of_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def _of_mixture(mixture: Mixture, settings: MegatronConfig) -> dict[str, Any]:
    return dict(
        num_moe_experts=mixture.count,
        moe_router_topk=mixture.chosen,
        moe_ffn_hidden_size=mixture.width,
        moe_router_score_function="softmax",
        moe_router_pre_softmax=not mixture.normalised,
        expert_model_parallel_size=settings.expert_model_parallel_size,
        expert_tensor_parallel_size=settings.expert_tensor_size,
        moe_router_dtype=settings.moe_router_dtype,
        moe_permute_fusion=settings.moe_permute_fusion,
        # what another model has, or what would make a gradient depend on micro-batches
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_z_loss_coeff=None,
        moe_input_jitter_eps=None,
        moe_router_enable_expert_bias=False,
        moe_router_bias_update_rate=0.0,
        moe_shared_expert_intermediate_size=None,
        moe_latent_size=None,
        moe_expert_capacity_factor=None,
        moe_grouped_gemm=False,
        moe_apply_probs_on_input=False,
        moe_enable_routing_replay=False,
    )


def _of_engine(settings: MegatronConfig, dtype: torch.dtype) -> dict[str, Any]:
    return dict(
        tensor_model_parallel_size=settings.tensor_model_parallel_size,
        pipeline_model_parallel_size=settings.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=settings.chunks if settings.chunks > 1 else None,
        # what two stages send each other in both directions at once would be mixed up
        overlap_p2p_comm=settings.chunks > 1,
        batch_p2p_comm=settings.chunks == 1,
        context_parallel_size=settings.context_parallel_size,
        sequence_parallel=settings.sequence_parallel and settings.tensor_model_parallel_size > 1,
        # packed lines differ in length, and every stage must be told
        variable_seq_lengths=settings.pipeline_model_parallel_size > 1,
        moe_token_dispatcher_type="alltoall",  # the only one with lengths that differ
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # the law of gradients: a loss holds its own denominators
        calculate_per_token_loss=True,
        perform_initialization=False,
        use_cpu_initialization=True,
    )


def frequencies(config: Any) -> torch.Tensor:
    """(d / 2,) rotary frequencies, as transformers computes them."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponents)
    found, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return found
