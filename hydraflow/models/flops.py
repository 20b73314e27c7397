"""FLOPs of a forward pass of a causal language model, from its configuration.

In: a configuration of transformers. Out: `LayerFlops`; None for a model type that is not in `MLP_MATRICES`,
or that runs its own code. Only products are counted: of a token with the layers' weights, and of a query with
the keys and values that it sees. `memory/shape.py` describes models by what they store, for fewer types and
without transformers. Left out on purpose: recurrent layers, encoders, image and audio towers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hydraflow.models.windows import window_of

_PLAIN = "apertus arcee gpt2 gpt_neox nanochat nemotron phi starcoder2"
_GATED = (
    "cohere cohere2 cwm deepseek_v2 deepseek_v3 dots1 ernie4_5 exaone4 flex_olmo gemma gemma2 gemma3_text"
    " glm glm4 glm4_moe glm4_moe_lite gpt_oss granite granitemoe hunyuan_v1_dense llama minicpm3"
    " minimax_m2 ministral ministral3 mistral mixtral olmo olmo2 olmo3 olmoe phi3 qwen2 qwen2_moe qwen3"
    " qwen3_moe seed_oss smollm3 solar_open stablelm youtu"
)
MLP_MATRICES = dict.fromkeys(_PLAIN.split(), 2) | dict.fromkeys(_GATED.split(), 3)
"""Matrices of an MLP, or of an expert, by model type: 3 with a gate, else 2. config.json says the rest."""


@dataclass(frozen=True)
class LayerFlops:
    """FLOPs of all layers together in a forward pass; the output matrix is not among them."""

    per_token: int
    """Of one token with the weights, the experts that it is sent to included."""
    per_pair: Mapping[int | None, int]
    """Of one query with one key and its value, by the layers' window: the number of keys, its own included,
    that a query sees; None: it sees all earlier ones."""


def layer_flops(config: Any) -> LayerFlops | None:
    """The products that a configuration describes.

    >>> from transformers import LlamaConfig
    >>> sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> layer_flops(LlamaConfig(**sizes))  # 2 · (4 · 8² + 3 · 8 · 16), 4 · 2 heads · 4
    LayerFlops(per_token=1280, per_pair={None: 32})
    """
    from transformers import CONFIG_MAPPING

    kind = config.model_type
    if kind not in MLP_MATRICES or type(config) is not CONFIG_MAPPING[kind]:
        return None
    attention, widths = _latent(config) if hasattr(config, "kv_lora_rank") else _grouped(config)
    mlp, weights = MLP_MATRICES[kind] * config.hidden_size, config.num_hidden_layers * attention
    for layer in range(config.num_hidden_layers):
        weights += _experts(config, mlp) if _is_sparse(config, layer) else mlp * _mlp_width(config)
    layers = Counter(window_of(config, layer) for layer in range(config.num_hidden_layers))
    return LayerFlops(2 * weights, {window: 2 * widths * count for window, count in layers.items()})


def _grouped(config: Any) -> tuple[int, int]:
    """Weights of one layer's attention, and the widths of all query heads and all values together."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.hidden_size * (heads + kv_heads) * head_dim, 2 * heads * head_dim


def _latent(config: Any) -> tuple[int, int]:
    """As `_grouped`, where keys and values are made of one narrow vector per token (DeepSeek-V2,
    https://arxiv.org/abs/2405.04434, section 2.1)."""
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    plain, value = config.qk_nope_head_dim, config.v_head_dim
    query = plain + config.qk_rope_head_dim
    rank = config.q_lora_rank
    queries = rank * (hidden + heads * query) if rank else hidden * heads * query
    keys_and_values = hidden * (latent + config.qk_rope_head_dim) + latent * heads * (plain + value)
    return queries + keys_and_values + heads * value * hidden, heads * (query + value)


def _mlp_width(config: Any) -> int:
    width = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    return width or 4 * config.hidden_size  # the default of n_inner


def _experts(config: Any, mlp: int) -> int:
    """Weights that one token is multiplied with in a layer with experts: router, chosen experts, shared ones.
    `mlp`: weights of an MLP of width 1."""
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    shared = mlp * width * (getattr(config, "n_shared_experts", None) or 0)
    if own := getattr(config, "shared_expert_intermediate_size", None):
        shared = mlp * own + config.hidden_size  # and its gate
    return config.hidden_size * _expert_count(config) + config.num_experts_per_tok * mlp * width + shared


def _expert_count(config: Any) -> int:
    return getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0


def _is_sparse(config: Any, layer: int) -> bool:
    """Whether the layer has experts: as listed, by the number of dense layers at the start (DeepSeek), or by
    exceptions and every n-th layer (Qwen)."""
    if kinds := getattr(config, "mlp_layer_types", None):
        return bool(kinds[layer] == "sparse")
    first_dense = getattr(config, "first_k_dense_replace", None) or 0
    if not _expert_count(config) or layer < first_dense:
        return False
    every = getattr(config, "decoder_sparse_step", 1)
    return layer not in (getattr(config, "mlp_only_layers", None) or ()) and (layer + 1) % every == 0
