"""Which Hugging Face models are built on Megatron-Core, and what their weights are divided by.

In: `config.json` as transformers reads it. Out: an `Architecture`; a model that would be computed differently
is refused with what differs. Megatron-Core itself is not imported: a plan asks, too. Left out on purpose:
Megatron-Core's configuration (`core_config.py`), weights (`names.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hydraflow.engine.config import MegatronConfig
from hydraflow.errors import ConfigError, Problem

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Model types that are built here."""
ROTARY = ("default", "linear", "llama3")
"""Types of rotary embeddings whose frequencies are all there is to them."""


@dataclass(frozen=True)
class Mixture:
    """The experts of a model."""

    count: int
    """Experts of a layer."""
    chosen: int
    """Experts of a token."""
    width: int
    """Columns of an expert."""
    normalised: bool
    """Whether the weights of a token's experts add up to 1."""
    layers: tuple[bool, ...]
    """Of each layer whether it has experts; the others have an MLP."""


@dataclass(frozen=True)
class Architecture:
    """What a model's weights are divided by."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    tied: bool
    """Whether the output matrix is the embedding."""
    qkv_bias: bool
    norm_of_heads: bool
    """Whether queries and keys are normalised."""
    eps: float
    """Of RMSNorm."""
    mixture: Mixture | None = None
    """None: a dense model."""

    @classmethod
    def of(cls, config: Any, *, field: str, path: Any) -> Architecture:
        """Raises ConfigError for a model that is not built here."""
        if rules := list(_differences(config)):
            remedy = f"{section_of(field)}.strategy=fsdp2"
            raise ConfigError([Problem(f"{field}.path", path, rule, remedy) for rule in rules])
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            vocabulary=config.vocab_size,
            tied=bool(config.tie_word_embeddings),
            qkv_bias=config.model_type == "qwen2",
            norm_of_heads=config.model_type in ("qwen3", "qwen3_moe"),
            eps=config.rms_norm_eps,
            mixture=_mixture(config),
        )

    def require_divisible(self, settings: MegatronConfig, *, section: str) -> None:
        """ConfigError for sizes that the model does not divide by. `section`: the role's. With context
        parallelism each rank attends with some of its heads; heads of keys are repeated as needed."""
        engine = f"{section}.megatron"
        found = [
            _indivisible(f"{engine}.{key}_parallel_size", size, count, what)
            for key, size, count, what in (*self._shares(settings), *self._shares_of_experts(settings))
            if count % size
        ]
        if self.mixture and settings.tensor_model_parallel_size > 1 and not settings.sequence_parallel:
            rule = "a model with experts needs it where tensor_model_parallel_size is above 1"
            remedy = f"{engine}.sequence_parallel=true"
            found.append(Problem(f"{engine}.sequence_parallel", False, rule, remedy))
        if found:
            raise ConfigError(found)

    def _shares(self, settings: MegatronConfig) -> Iterator[tuple[str, int, int, str]]:
        """Key, size, and what it divides: the number and the word."""
        tensor, stages = settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size
        heads = f"{self.heads} attention heads and the {self.kv_heads} key-value heads"
        yield "tensor_model", tensor, math.gcd(self.heads, self.kv_heads), heads
        if self.mixture is None or not all(self.mixture.layers):
            yield "tensor_model", tensor, self.intermediate, f"{self.intermediate} columns of an MLP"
        own = max(1, self.heads // tensor)
        yield (
            "context",
            settings.context_parallel_size,
            own,
            f"{own} attention heads of each tensor-parallel rank",
        )
        if not settings.gives_layers:
            yield "pipeline_model", stages, self.layers, f"{self.layers} layers"
            own = self.layers // stages
            yield "virtual_pipeline_model", settings.chunks, own, f"{own} layers of each stage"

    def _shares_of_experts(self, settings: MegatronConfig) -> Iterator[tuple[str, int, int, str]]:
        size, mixture = settings.expert_model_parallel_size, self.mixture
        if mixture is None:
            yield "expert_model", size, 1, "0 experts"
            return
        yield "expert_model", size, mixture.count, f"{mixture.count} experts"
        yield (
            "expert_tensor",
            settings.expert_tensor_size,
            mixture.width,
            f"{mixture.width} columns of an expert",
        )


def _indivisible(key: str, size: int, count: int, what: str) -> Problem:
    legal = [divisor for divisor in range(1, count + 1) if count % divisor == 0]
    near = sorted(legal, key=lambda one: abs(one - size))[:2]
    return Problem(
        key, size, f"must divide the {what} of the model", " or ".join(f"{key}={one}" for one in near)
    )


def section_of(field: str) -> str:
    """The role whose engine builds the model of this section."""
    return "critic" if field.startswith("critic") else "actor_rollout_ref.actor"


def _mixture(config: Any) -> Mixture | None:
    layers = config.num_hidden_layers
    if config.model_type == "mixtral":
        chosen, width = config.num_experts_per_tok, config.intermediate_size
        return Mixture(config.num_local_experts, chosen, width, True, (True,) * layers)
    if config.model_type != "qwen3_moe":
        return None
    step, dense = config.decoder_sparse_step, config.mlp_only_layers
    return Mixture(
        count=config.num_experts,
        chosen=config.num_experts_per_tok,
        width=config.moe_intermediate_size,
        normalised=config.norm_topk_prob,
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
    )


def _differences(config: Any) -> Iterator[str]:
    """What Megatron-Core, as it is built here, would not compute as transformers does."""
    if config.model_type not in FAMILIES:
        yield f"the Megatron engine builds {', '.join(FAMILIES)} models, not {config.model_type}"
        return
    kinds = set(getattr(config, "layer_types", None) or ())
    if "sliding_attention" in kinds or (not kinds and getattr(config, "sliding_window", None)):
        yield "the Megatron engine has no attention with a sliding window"
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        yield f"the Megatron engine has no biases in a {config.model_type} model"
    if getattr(config, "router_jitter_noise", 0.0):
        yield "the Megatron engine has no noise in routers (router_jitter_noise)"
    mixture = _mixture(config)
    if mixture and mixture.normalised and mixture.chosen == 1:
        yield "the Megatron engine has no router whose one expert always has a weight of 1"
    if mixture and not any(mixture.layers):
        yield "the Megatron engine builds no mixture of experts without layers of experts"
    if config.hidden_act != "silu":
        yield f"the Megatron engine has no activation {config.hidden_act}"
    if (kind := config.rope_parameters["rope_type"]) not in ROTARY:
        yield f"the Megatron engine has no rotary embeddings of type {kind}"
    if ({"partial_rotary_factor": 1.0} | config.rope_parameters)["partial_rotary_factor"] != 1.0:
        yield "the Megatron engine rotates all of a head"
