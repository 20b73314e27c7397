"""Tiny models with random weights, of each type of causal language model that transformers has.

In: a type's name, as in `config.json`. Out: a configuration, or a directory. Sizes are set by their names,
which most types share; `MORE` has additional values for some types. Left out on purpose: tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY = 64
MOST_WEIGHTS = 5_000_000
"""Limit of a tiny model; a larger one has a size whose name is missing in `_NAMES`."""

_NAMES = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input audio_vocab_size input_embedding_size"
    " output_embedding_size pronunciation_vocab_size shape_vocab_size decoder_vocab_size",
    32: "hidden_size d_model n_embd emb_dim lru_width embedding_size word_embed_proj_dim embedding_dim"
    " hidden_size_per_layer_input kv_lora_rank q_lora_rank o_lora_rank attention_hidden_size"
    " pronunciation_embed_dim shape_embed_dim router_hidden_size ple_embed_dim backbone_hidden_size"
    " mamba_d_ssm dim_model_base",
    48: "intermediate_size ffn_dim d_ff dff dim_ff d_inner ffn_hidden_size n_inner intermediate_size_mlp"
    " encoder_ffn_dim decoder_ffn_dim dense_intermediate_size feed_forward_size",
    16: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size linear_key_head_dim"
    " linear_value_head_dim moe_shared_expert_intermediate_size shared_intermediate_size mamba_d_state"
    " state_size ssm_state_size adapter_rank prompt_mid_dim laurel_rank gated_norm_rank"
    " hc_lowrank num_centroids mamba_dt_rank time_step_rank chunk_size mamba_chunk_size block_size",
    4: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_attention_heads"
    " n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads"
    " num_encoder_layers num_decoder_layers num_encoder_attention_heads num_decoder_attention_heads"
    " num_local_experts num_experts n_routed_experts moe_num_experts linear_num_value_heads"
    " linear_num_key_heads swa_num_attention_heads expert_layer_period num_blocks"
    " attn_layer_period sliding_window_pattern",
    2: "num_experts_per_tok top_k moe_topk moe_k top_k_experts num_key_value_heads num_kv_heads"
    " swa_num_key_value_heads n_groups mamba_n_heads_per_group o_groups num_layers_per_stack",
    8: "head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim sliding_window"
    " sliding_window_size attention_window_size attention_chunk_size window_size rotary_dim dim_head d_head"
    " attention_head_size mamba_n_heads mamba_num_heads mamba_d_head mamba_head_dim swa_head_dim"
    " attention_head_dim kv_channels index_topk local_attention",
    128: "max_position_embeddings n_positions max_seq_len n_ctx context_length max_target_positions",
    1: "n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group eos_token_id"
    " mamba_n_groups mamba_ngroups num_mem_blocks",
    0: "bos_token_id pad_token_id",
}
_SMALL = {name: size for size, names in _NAMES.items() for name in names.split()}
_SMALL |= {"index_n_heads": 64, "index_head_dim": 32}
"""With fewer index heads, many keys score exactly 0, and the choice among them is arbitrary."""
_LINEAR = [*["linear_attention"] * 3, "full_attention"]
MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4},
    },
    "falcon_h1": {"mamba_d_ssm": 64, "lm_head_multiplier": 0.3},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 0,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"],
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granite": {"logits_scaling": 8.0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hyperclovax": {"logits_scaling": 0.1},
    "jamba": {"attn_layer_offset": 1},
    "kimi_linear": {
        "num_experts_per_token": 2,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "layer_types": _LINEAR,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8, "qk_head_dim": 16},
    "mamba2": {"num_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_key_value_heads": 1},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "lsh"], "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 8,
        "attn_layer_offset": 1,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "n_mamba_heads": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Type -> additional values of its configuration."""
MORE["qwen4_exp"] = {"text_config": MORE["qwen4_exp_text"]}
MORE["gemma3n"] = {"text_config": MORE["gemma3n_text"]}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A configuration with small sizes. transformers' errors about incompatible sizes propagate."""
    return _shrunk(CONFIG_MAPPING[model_type], MORE.get(model_type, {}))


def _shrunk(kind: type[PreTrainedConfig], more: Mapping[str, Any]) -> PreTrainedConfig:
    """more: additional values; for nested configurations, dicts of them."""
    within = {
        name: _shrunk(type(one), more.get(name, {}))
        for name, one in vars(kind()).items()
        if isinstance(one, PreTrainedConfig)
    }
    known = {kind.attribute_map.get(name, name) for name in vars(kind())}
    own = {name: size for name, size in _SMALL.items() if name in known}
    if "is_decoder" in known:
        own["is_decoder"] = True
    if "use_sliding_window" in known:  # in the upper half of the layers
        own |= {"use_sliding_window": True, "max_window_layers": 2}
    if "kv_lora_rank" in known:  # latent attention has as many heads of keys as of queries
        own["num_key_value_heads"] = own["num_attention_heads"]
    return kind(**{**own, **more, **within})


def save_tiny(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    """Writes a model in which every weight matters, and returns it. ValueError if it is not tiny."""
    with torch.device("meta"):
        size = sum(one.numel() for one in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_WEIGHTS:
        raise ValueError(f"{size} weights: one of its sizes has an unknown name")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(config)
        for parameter in lm.parameters():
            wide = parameter.ndim > 1
            parameter.data = torch.randn_like(parameter) * 0.2 + (0 if wide else parameter.data)
    lm.save_pretrained(folder)
    return lm.eval()
