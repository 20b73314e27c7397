"""The arguments of Megatron-Core's TransformerConfig that follow from the model and from other keys.

In: an `Architecture`, and the sizes of the engine. Out: arguments, or a ConfigError, with the reason, for
overrides that contradict them. It also runs before a run starts, so Megatron-Core is not imported. Left out
on purpose: the configuration itself (`core_config.py`), gradient buffers (`ddp_config.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from hydraflow.engine.config import MegatronConfig
from hydraflow.engine.megatron.architecture import Architecture, Mixture
from hydraflow.errors import ConfigError, Problem, shown

OVERRIDES = "override_transformer_config"


def fixed_arguments(shape: Architecture, settings: MegatronConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of Megatron-Core's configuration that follow from the model and our keys, by name."""
    found = OF_OTHER_MODELS | _model_arguments(shape) | _engine_arguments(settings, dtype)
    return found if shape.mixture is None else found | _mixture_arguments(shape.mixture, settings)


def require_free(shape: Architecture, settings: MegatronConfig, dtype: torch.dtype, *, section: str) -> None:
    """Raises ConfigError for overrides of fixed arguments, for settings that cannot work with this model, and
    for kernels that are not installed; `section`: the role's."""
    engine, fixed = f"{section}.megatron", fixed_arguments(shape, settings, dtype)
    problems = list(_missing_kernels(shape, settings, engine))
    problems += _balance_problems(shape.mixture, settings, engine)
    problems += _recomputation_problems(shape, settings, engine)
    for name, value in sorted(settings.override_transformer_config.items()):
        if name in fixed and value != fixed[name]:
            key = f"{engine}.{OVERRIDES}.{name}"
            remedy = f"{engine}.{name}={shown(value)}" if hasattr(settings, name) else f"leave out {key}"
            problems.append(Problem(key, shown(value), _WHY.get(name, _FOLLOWS), remedy))
    if problems:
        raise ConfigError(problems)


def _missing_kernels(shape: Architecture, settings: MegatronConfig, engine: str) -> Iterator[Problem]:
    """Kernels that are asked for and not installed."""
    overrides = settings.override_transformer_config
    if shape.mixture and find_spec("transformer_engine") is None:
        asked = {"moe_permute_fusion": settings.moe_permute_fusion}
        asked[f"{OVERRIDES}.moe_router_fusion"] = bool(overrides.get("moe_router_fusion"))
        for name in (name for name, wanted in asked.items() if wanted):
            key = f"{engine}.{name}"
            yield Problem(key, True, "Transformer Engine is not installed", f"{key}=false")
    if overrides.get("gradient_accumulation_fusion") and find_spec("fused_weight_gradient_mlp_cuda") is None:
        key = f"{engine}.{OVERRIDES}.gradient_accumulation_fusion"
        yield Problem(key, True, "Apex and its kernel for it are not installed", f"{key}=false")


def _balance_problems(mixture: Mixture | None, settings: MegatronConfig, engine: str) -> Iterator[Problem]:
    """Load-balancing settings that cannot work."""
    loss, rate = f"{engine}.moe_aux_loss_coeff", f"{engine}.moe_router_bias_update_rate"
    has_loss = settings.moe_aux_loss_coeff > 0 and settings.moe_router_load_balancing_type != "none"
    if has_loss and mixture is None:
        yield Problem(loss, settings.moe_aux_loss_coeff, "the model has no experts", f"{loss}=0")
    if has_loss and "moe" in settings.recomputed_parts:
        name = f"{engine}.{OVERRIDES}.recompute_modules"
        rule = f"when only the experts are recomputed, the rows of {loss} are not known"
        given = settings.override_transformer_config["recompute_modules"]
        yield Problem(name, shown(given), rule, f"leave out {name}, to recompute whole layers")
    if settings.moe_router_bias_update_rate > 0 and not (mixture and mixture.by_sigmoid):
        rule = "the routers of the model have no biases"
        yield Problem(rate, settings.moe_router_bias_update_rate, rule, f"{rate}=0")


def _recomputation_problems(shape: Architecture, settings: MegatronConfig, engine: str) -> Iterator[Problem]:
    """Parts of a layer that cannot be recomputed on their own."""
    overrides, name = settings.override_transformer_config, f"{engine}.{OVERRIDES}.recompute_modules"
    parts = settings.recomputed_parts
    if "layernorm" in parts and find_spec("transformer_engine") is None:
        rule = "norms are recomputed on their own only with Transformer Engine, which is not installed"
        yield Problem(name, shown(overrides["recompute_modules"]), rule, f"leave layernorm out of {name}")
    is_selective = overrides.get("recompute_granularity") == "selective"
    if shape.latent and is_selective and "core_attn" in (parts or ("core_attn",)):
        granularity = f"{engine}.{OVERRIDES}.recompute_granularity"
        rule = "latent attention is not recomputed on its own"
        yield Problem(
            name, shown(list(parts) or None), rule, f"leave out {granularity}, to recompute whole layers"
        )


_FOLLOWS = "follows from the model and from other keys"
_DISPATCHER = "only alltoall supports lines of different lengths"
_BY_MICRO_BATCH = "the gradient would depend on how rows are split into micro-batches"
_WHY = {
    "moe_grouped_gemm": "the engine has its own experts, with one tensor per matrix",
    **dict.fromkeys(("moe_token_dispatcher_type", "moe_enable_deepep"), _DISPATCHER),
    "tp_comm_overlap": "the engine creates no communication buffers of Transformer Engine",
    "delay_wgrad_compute": "gradients of weights are computed with those of activations",
    "moe_layer_recompute": "recompute_granularity=selective with recompute_modules=[moe] replaced it",
    "calculate_per_token_loss": "losses include their denominators, so gradients are summed, not averaged",
    **dict.fromkeys(
        ("moe_router_load_balancing_type", "moe_z_loss_coeff", "moe_input_jitter_eps"), _BY_MICRO_BATCH
    ),
}
"""Reasons other than `_FOLLOWS`."""
OF_OTHER_MODELS: dict[str, Any] = {
    "num_moe_experts": None,
    "moe_layer_freq": 1,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_force_load_balancing": False,
    "multi_latent_attention": False,
    "mtp_num_layers": None,
    "rotary_interleaved": False,
    "no_rope_freq": None,
    "softmax_scale": None,
    "window_size": None,
    "layernorm_zero_centered_gamma": False,
    "attention_softmax_in_fp32": True,
    "fp16": False,
    "fp8": None,
    "fp4": None,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "moe_router_topk_limited_devices": None,
    "enable_autocast": False,
    # not supported by the engine's layers or its schedule
    "num_microbatches_with_partial_activation_checkpoints": None,
    "microbatch_group_size_per_vp_stage": None,
    "fp32_residual_connection": False,
    "attention_output_gate": False,
    "heterogeneous_block_specs": False,
    "use_te_activation_func": False,
    "fused_single_qkv_rope": False,
    "hybrid_context_parallel": False,
    "fine_grained_activation_offloading": False,
    "timers": None,
    # ignored by them
    "softmax_type": "vanilla",
    "qk_l2_norm": False,
    "qk_clip": False,
    "window_attn_skip_freq": None,
    "apply_query_key_layer_scaling": False,
    "apply_residual_connection_post_layernorm": False,
    "experimental_attention_variant": None,
    "linear_attention_freq": None,
    "mrope_section": None,
    "cp_comm_type": None,
    "hierarchical_context_parallel_sizes": None,
    "flash_decode": False,
    "use_kitchen": False,
    "quant_recipe": None,
    "moe_token_dropping": False,
}
"""Megatron-Core's defaults for arguments that would change a supported model, or that the engine's layers do
not support or ignore."""


def _model_arguments(shape: Architecture) -> dict[str, Any]:
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


def _mixture_arguments(mixture: Mixture, settings: MegatronConfig) -> dict[str, Any]:
    return dict(
        num_moe_experts=mixture.count,
        moe_router_topk=mixture.chosen,
        moe_ffn_hidden_size=mixture.width,
        moe_router_score_function="sigmoid" if mixture.by_sigmoid else "softmax",
        moe_router_pre_softmax=not mixture.normalised,
        moe_router_topk_scaling_factor=mixture.scaling,
        moe_router_num_groups=mixture.groups,
        moe_router_group_topk=mixture.chosen_groups,
        moe_router_enable_expert_bias=mixture.by_sigmoid,
        moe_router_bias_update_rate=0.0,  # the engine itself updates biases, after an optimizer step
        moe_shared_expert_intermediate_size=mixture.shared,
        moe_shared_expert_gate=mixture.shared_gate,
        moe_shared_expert_overlap=False,
        expert_model_parallel_size=settings.expert_model_parallel_size,
        expert_tensor_parallel_size=settings.expert_tensor_size,
        moe_router_dtype=settings.moe_router_dtype,
        moe_permute_fusion=settings.moe_permute_fusion,
        # features of other models, or losses whose gradient depends on micro-batches; the one that does
        # not is the engine's own (balance.py)
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_z_loss_coeff=None,
        moe_input_jitter_eps=None,
        moe_latent_size=None,
        moe_expert_capacity_factor=None,
        moe_grouped_gemm=False,
        moe_enable_deepep=False,
        moe_apply_probs_on_input=False,
        moe_enable_routing_replay=False,
        moe_layer_recompute=False,
    )


def _engine_arguments(settings: MegatronConfig, dtype: torch.dtype) -> dict[str, Any]:
    return dict(
        tensor_model_parallel_size=settings.tensor_model_parallel_size,
        pipeline_model_parallel_size=settings.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=settings.chunks if settings.chunks > 1 else None,
        # batched sends in both directions between two stages would be mixed up
        overlap_p2p_comm=settings.chunks > 1,
        batch_p2p_comm=settings.chunks == 1,
        context_parallel_size=settings.context_parallel_size,
        sequence_parallel=settings.sequence_parallel and settings.tensor_model_parallel_size > 1,
        # packed lines differ in length, so stages exchange shapes
        variable_seq_lengths=settings.pipeline_model_parallel_size > 1,
        tp_comm_overlap=False,
        delay_wgrad_compute=False,
        moe_token_dispatcher_type="alltoall",  # the only dispatcher that supports different lengths
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # the gradient law: losses include their denominators
        calculate_per_token_loss=True,
        perform_initialization=False,
        use_cpu_initialization=True,
    )
