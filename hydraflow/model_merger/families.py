"""The tensors of the most common decoders, derived from config.json alone: importing transformers takes
longer than copying a model.

In: config.json's content. Out: names and shapes, or None for anything that is not exactly one of these
families; then transformers is used (`architecture.py`). A test compares the table with transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hydraflow.engine.stored.pieces import Shape
from hydraflow.memory.shape import FAMILIES, flag

CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""model_type in config.json -> prefix of its class names."""
_HEADS = ("num_attention_heads", "num_key_value_heads")
EMBEDDING, OUTPUT, SCORE = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", *_HEADS)
_STRANGE = ("auto_map", "quantization_config", "pruned_heads")
"""Keys that may change the tensors; with one of them, transformers is asked."""


def class_name(config: Mapping[str, Any], head: str) -> str | None:
    """The name of the model's class in transformers; None: transformers must be asked. `head`: policy or
    value."""
    kind = str(config.get("model_type"))
    known = kind in CLASSES and all(type(config.get(key)) is int for key in _SIZES)
    if not known or any(config.get(key) for key in _STRANGE):
        return None
    needs_head_dim = FAMILIES[kind].head_dim or config["hidden_size"] % config["num_attention_heads"]
    if needs_head_dim and type(config.get("head_dim")) is not int:
        return None
    if type(config.get("tie_word_embeddings")) is not bool:
        return None
    causal = f"{CLASSES[kind]}ForCausalLM"
    if head == "policy" and config.get("architectures") != [causal]:
        return None
    return causal if head == "policy" else f"{CLASSES[kind]}ForTokenClassification"


def tensors(config: Mapping[str, Any], head: str, *, score_bias: bool = False) -> Iterator[tuple[str, Shape]]:
    """(name, shape) of every tensor of a model that `class_name` knows, a tied output matrix included."""
    hidden = config["hidden_size"]
    yield EMBEDDING, (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in _layer(config):
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (hidden,)
    if head == "policy":
        yield OUTPUT, (config["vocab_size"], hidden)
        return
    yield SCORE, (1, hidden)
    if score_bias:
        yield "score.bias", (1,)


def _layer(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, between, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    queries, keys = heads * width, config["num_key_value_heads"] * width
    family = FAMILIES[config["model_type"]]
    attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    attention["o_proj"] = (hidden, queries)
    for name, shape in attention.items():
        yield f"self_attn.{name}.weight", shape
        if flag(config, family.output_bias if name == "o_proj" else family.qkv_bias):
            yield f"self_attn.{name}.bias", shape[:1]
    if family.qk_norm:
        yield "self_attn.q_norm.weight", (width,)
        yield "self_attn.k_norm.weight", (width,)
    wide, narrow = (between, hidden), (hidden, between)
    for name, shape in {"gate_proj": wide, "up_proj": wide, "down_proj": narrow}.items():
        yield f"mlp.{name}.weight", shape
        if flag(config, family.mlp_bias):
            yield f"mlp.{name}.bias", shape[:1]
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
