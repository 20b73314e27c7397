"""The shape of a causal language model as its config.json describes it: widths, layers, experts, and from
them exact parameter counts.

In: a mapping as in config.json. Out: `ModelShape`, or a ConfigError that names what is missing. No file of
weights is opened. A model type that is not in `FAMILIES` is counted as Llama's and says so in its notes. Left
out on purpose: vision and audio towers (the language model of a multimodal file is counted), recurrent
layers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydraflow.errors import ConfigError, Problem
from hydraflow.models.chunks import POST_PROCESSING
from hydraflow.models.config import ModelSourceConfig
from hydraflow.system.paths import expanded


@dataclass(frozen=True)
class ModelShape:
    """Widths and counts of a decoder whose layers are attention and a gated MLP or experts."""

    model_type: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP in a layer without experts."""
    tied: bool
    """The output matrix is the embedding."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised per head."""
    fused: bool = False
    """As `ModelTypeTraits.fused`."""
    usual_norms: bool = True
    """As `ModelTypeTraits.usual_norms`."""
    experts: int = 0
    """Routed experts of a layer; 0: a dense model."""
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    """Width of the shared expert; 0: there is none."""
    dense_at: Sequence[int] = ()
    """Indices of the layers without experts; all of a dense model."""
    logit_copies: int = 0
    """Copies of the logits that their post-processing makes."""
    notes: tuple[str, ...] = ()
    """Assumptions, as sentences for the user."""

    @property
    def q_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """Numbers in the embedding matrix, and in the output matrix."""
        return self.vocabulary * self.hidden

    @property
    def attention(self) -> int:
        """Parameters of one layer's attention."""
        matrices = 2 * self.hidden * (self.q_width + self.kv_width)
        biases = self.qkv_bias * (self.q_width + 2 * self.kv_width) + self.output_bias * self.hidden
        return matrices + biases + 2 * self.head_dim * self.qk_norm

    @property
    def dense_mlp(self) -> int:
        """Parameters of one MLP without experts."""
        return _gated(self.hidden, self.intermediate) + self.mlp_bias * (2 * self.intermediate + self.hidden)

    @property
    def expert(self) -> int:
        """Parameters of one routed expert."""
        return _gated(self.hidden, self.expert_intermediate)

    @property
    def shared_expert(self) -> int:
        """Parameters of the shared expert and of the gate in front of it."""
        return _gated(self.hidden, self.shared_intermediate) + self.hidden if self.shared_intermediate else 0

    @property
    def dense_layer(self) -> int:
        """Parameters of a layer without experts, its two norms included."""
        return self.attention + self.dense_mlp + 2 * self.hidden

    @property
    def sparse_layer(self) -> int:
        """Parameters of a layer with attention, router, all experts, two norms; 0 for a dense model."""
        if not self.experts:
            return 0
        routed = self.experts * (self.hidden + self.expert)
        return self.attention + routed + self.shared_expert + 2 * self.hidden

    @property
    def matrices(self) -> list[tuple[int, int, int]]:
        """Count, outer and inner dimension of all matrices but those of routed experts; queries, keys and
        values are one, and so are gate and up."""
        hidden = self.hidden
        found = [
            (self.layers, self.q_width + 2 * self.kv_width, hidden),
            (self.layers, hidden, self.q_width),
            (1, self.vocabulary, hidden),
        ]
        for layers, width in (
            (self.dense_layers, self.intermediate),
            (self.sparse_layers, self.shared_intermediate),
        ):
            found += [(layers, 2 * width, hidden), (layers, hidden, width)]
        return found

    @property
    def dense_layers(self) -> int:
        """Number of layers without experts."""
        return len(self.dense_at)

    @property
    def sparse_layers(self) -> int:
        """Number of layers with experts."""
        return self.layers - self.dense_layers

    @property
    def parameters(self) -> int:
        """All parameters, a tied output matrix counted once.

        >>> llama3_8b = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        ...     "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        ...     "vocab_size": 128256}
        >>> shape_of(llama3_8b).parameters
        8030261248
        """
        layers = self.dense_layers * self.dense_layer + self.sparse_layers * self.sparse_layer
        return layers + self.hidden + self.embedding * (1 if self.tied else 2)

    @property
    def value_parameters(self) -> int:
        """All parameters with one output instead of the vocabulary: a critic."""
        return self.parameters - (0 if self.tied else self.embedding) + self.hidden

    @property
    def largest_tensor(self) -> int:
        """Numbers in the largest single tensor; the experts of a layer are stored in two."""
        attention, mlp = self.q_width, self.intermediate
        if self.fused:
            attention, mlp = self.q_width + 2 * self.kv_width, 2 * self.intermediate
        experts = 2 * self.experts * self.expert_intermediate
        return self.hidden * max(self.vocabulary, attention, mlp, experts)


@dataclass(frozen=True)
class ModelTypeTraits:
    """Facts about a model type that config.json does not state. A flag is a constant, or the key that holds
    it."""

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    tied: bool = False
    """Default if the file does not say."""
    head_dim: int | None = None
    """Default if the file does not say; None: hidden / heads."""
    expert_width: str = "moe_intermediate_size"
    fused: bool = False
    """Query, key and value are stored as one matrix, and the two matrices into the MLP as another."""
    usual_norms: bool = True
    """Norms are those that `models/norms.py` replaces."""


_LLAMA = ModelTypeTraits("attention_bias", "attention_bias", "mlp_bias")
_QWEN3 = ModelTypeTraits("attention_bias", "attention_bias", qk_norm=True, head_dim=128)
FAMILIES: dict[str, ModelTypeTraits] = {
    "llama": _LLAMA,
    "mistral": ModelTypeTraits(),
    "mixtral": ModelTypeTraits(expert_width="intermediate_size"),
    "qwen2": ModelTypeTraits(qkv_bias=True),
    "qwen2_moe": ModelTypeTraits(qkv_bias=True),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "granite": _LLAMA,
    "phi3": ModelTypeTraits(fused=True),
    "gemma": ModelTypeTraits("attention_bias", "attention_bias", tied=True, head_dim=256, usual_norms=False),
}
"""Model types whose parameters are counted exactly."""

_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_OPTIONAL = (
    "num_key_value_heads",
    "head_dim",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "shared_expert_intermediate_size",
    "decoder_sparse_step",
    "first_k_dense_replace",
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXCEPTIONS = "mlp_only_layers"
"""Qwen's key for layers without experts."""


def read_shape(model: ModelSourceConfig, *, field: str = "actor_rollout_ref.model") -> ModelShape | None:
    """The shape of a model whose directory is on this machine, or whose sizes are in `override_config`; None:
    neither. Raises ConfigError for a config.json that cannot be read or lacks sizes."""
    file = expanded(model.path or "") / "config.json"
    if model.path and os.path.isfile(file):
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            rule = f"its config.json cannot be read: {error}"
            raise ConfigError.one(f"{field}.path", model.path, rule) from error
        if not isinstance(found, dict):
            rule = "its config.json holds no mapping of names to values"
            raise ConfigError.one(f"{field}.path", model.path, rule)
        return shape_of({**_text_part(found), **model.override_config}, field=field)
    if all(key in model.override_config for key in _NEEDED):
        return shape_of(model.override_config, field=field)
    return None


def shape_of(config: Mapping[str, Any], *, field: str = "actor_rollout_ref.model") -> ModelShape:
    """The shape that a config.json describes. Raises ConfigError naming every size that is missing or not a
    positive number.

    >>> shape_of({"model_type": "qwen2", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
    ...     "num_attention_heads": 2, "vocab_size": 10, "tie_word_embeddings": True}).parameters
    768
    """
    config = _text_part(config)
    wrong = [key for key in _NEEDED if not _is_size(config.get(key))]
    wrong += [key for key in _OPTIONAL if config.get(key) and not _is_size(config[key])]
    if wrong:
        raise ConfigError([_problem(config, key, field) for key in wrong])
    if not isinstance(exceptions := config.get(_EXCEPTIONS) or [], list):
        rule = f"its config.json has {_EXCEPTIONS}={exceptions}, which must be a list of layers"
        raise ConfigError.one(f"{field}.path", None, rule)
    kind = str(config.get("model_type", "llama"))
    family = FAMILIES.get(kind, _LLAMA)
    heads, layers, hidden = config["num_attention_heads"], config["num_hidden_layers"], config["hidden_size"]
    intermediate = config["intermediate_size"]
    experts = next((int(config[key]) for key in _EXPERTS if config.get(key)), 0)
    dense = tuple(layer for layer in range(layers) if not (experts and _is_sparse(config, layer)))
    return ModelShape(
        model_type=kind,
        vocabulary=config["vocab_size"],
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or family.head_dim or hidden // heads,
        intermediate=intermediate,
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        qkv_bias=flag(config, family.qkv_bias),
        output_bias=flag(config, family.output_bias),
        mlp_bias=flag(config, family.mlp_bias),
        qk_norm=family.qk_norm,
        fused=family.fused,
        usual_norms=family.usual_norms,
        experts=experts,
        experts_per_token=int(config.get("num_experts_per_tok") or 0) if experts else 0,
        expert_intermediate=int(config.get(family.expert_width) or intermediate) if experts else 0,
        shared_intermediate=int(config.get("shared_expert_intermediate_size") or 0) if experts else 0,
        dense_at=dense,
        logit_copies=sum(n for key, n in POST_PROCESSING.items() if config.get(key) is not None),
        notes=tuple(_notes(config, kind)),
    )


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a multimodal config.json; otherwise all of it."""
    text = config.get("text_config")
    return {**text, "multimodal": config.get("model_type")} if isinstance(text, Mapping) else config


def _notes(config: Mapping[str, Any], kind: str) -> list[str]:
    notes = []
    if kind not in FAMILIES:
        known = "is not known to the memory estimate"
        notes.append(f"model_type={kind} {known}: it is counted as a Llama of these sizes")
    if "multimodal" in config:
        notes.append(f"{config['multimodal']}: only its language model is counted")
    return notes


def _gated(hidden: int, width: int) -> int:
    """Weights of an MLP with a gate: two matrices in, one out."""
    return 3 * hidden * width


def _is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    """Whether the layer has experts. Qwen's files give every n-th layer and exceptions, DeepSeek's the number
    of dense layers at the start."""
    first_dense = int(config.get("first_k_dense_replace") or 0)
    if layer in (config.get(_EXCEPTIONS) or ()) or layer < first_dense:
        return False
    return (layer + 1) % int(config.get("decoder_sparse_step") or 1) == 0


def flag(config: Mapping[str, Any], trait: bool | str) -> bool:
    """A flag of `ModelTypeTraits` for one config.json."""
    return trait if isinstance(trait, bool) else bool(config.get(trait, False))


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _problem(config: Mapping[str, Any], key: str, field: str) -> Problem:
    name = f"{field}.override_config.{key}"
    absent = "config.json does not give it, and the model's memory depends on it"
    rule = "must be a whole number above 0" if key in config else absent
    return Problem(name, config.get(key), rule, f"+{name}=<number>")
