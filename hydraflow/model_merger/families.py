"""The tensors of the commonest decoders, derived from config.json alone: transformers takes longer to import
than a model to copy.

In: config.json's content. Out: names and shapes, or None for anything that is not exactly one of these
families; transformers is asked then (`architecture.py`). A test holds the table to what transformers says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Family:
    """What distinguishes one family of decoders from the others."""

    name: str
    """Prefix of its class names."""
    biases: frozenset[str] = frozenset()
    """Projections that always have a bias."""
    attention_bias: bool = False
    """config.json's attention_bias gives all four projections one."""
    mlp_bias: bool = False
    """config.json's mlp_bias gives the three linear layers one."""
    head_norms: bool = False
    """Queries and keys are normalized by head."""


FAMILIES = {
    "llama": Family("Llama", attention_bias=True, mlp_bias=True),
    "mistral": Family("Mistral"),
    "qwen2": Family("Qwen2", biases=frozenset({"q_proj", "k_proj", "v_proj"})),
    "qwen3": Family("Qwen3", attention_bias=True, head_norms=True),
}
"""By config.json's model_type."""
EMBEDDING, OUTPUT, SCORE = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_STRANGE = ("auto_map", "quantization_config", "pruned_heads")


def class_name(config: Mapping[str, Any], head: str) -> str | None:
    """What transformers calls the model; None where transformers must be asked. head: policy or value."""
    family = FAMILIES.get(str(config.get("model_type")))
    if (
        family is None
        or any(config.get(key) for key in _STRANGE)
        or not all(type(config.get(key)) is int for key in _SIZES)
    ):
        return None
    if type(config.get("head_dim")) is not int and (
        family.head_norms or config["hidden_size"] % config["num_attention_heads"]
    ):
        return None
    if type(config.get("tie_word_embeddings")) is not bool:
        return None
    causal = f"{family.name}ForCausalLM"
    if head == "policy" and config.get("architectures") != [causal]:
        return None
    return causal if head == "policy" else f"{family.name}ForTokenClassification"


def tensors(config: Mapping[str, Any], head: str, *, score_bias: bool = False) -> Iterator[tuple[str, Shape]]:
    """(name, shape) of every tensor of a model that `class_name` knows, the output matrix included even if it
    is tied."""
    family, hidden = FAMILIES[config["model_type"]], config["hidden_size"]
    yield EMBEDDING, (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in _layer(family, config):
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (hidden,)
    if head == "policy":
        yield OUTPUT, (config["vocab_size"], hidden)
        return
    yield SCORE, (1, hidden)
    if score_bias:
        yield "score.bias", (1,)


def _layer(family: Family, config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, between, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    queries, keys = heads * width, config["num_key_value_heads"] * width
    attention = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    for name, shape in attention.items():
        yield f"self_attn.{name}.weight", shape
        if name in family.biases or (family.attention_bias and config.get("attention_bias")):
            yield f"self_attn.{name}.bias", shape[:1]
    if family.head_norms:
        yield "self_attn.q_norm.weight", (width,)
        yield "self_attn.k_norm.weight", (width,)
    for name, shape in {
        "gate_proj": (between, hidden),
        "up_proj": (between, hidden),
        "down_proj": (hidden, between),
    }.items():
        yield f"mlp.{name}.weight", shape
        if family.mlp_bias and config.get("mlp_bias"):
            yield f"mlp.{name}.bias", shape[:1]
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
