"""Which Hugging Face models the Megatron engine supports, and the sizes that parallelism must divide.

In: `config.json` as transformers reads it. Out: an `Architecture`; a model that would be computed differently
is refused, and the message names the difference. Megatron-Core is not imported, because the planner calls
this too. Left out on purpose: Megatron-Core's configuration (`core_config.py`), weights (`names.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hydraflow.batch_plan.parts import divisors
from hydraflow.engine.config import MegatronConfig
from hydraflow.errors import ConfigError, Problem
from hydraflow.models.windows import window_of

LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
"""Model types with latent attention."""
FAMILIES = (*LATENT, "glm4_moe", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Supported model types."""
ROTARY = ("default", "linear", "llama3")
"""Types of rotary embeddings that only change the frequencies."""


@dataclass(frozen=True)
class Mixture:
    """The experts of a model."""

    count: int
    """Experts per layer."""
    chosen: int
    """Experts per token (top-k)."""
    width: int
    """Intermediate size of an expert."""
    normalised: bool
    """Whether the weights of a token's experts add up to 1."""
    layers: tuple[bool, ...]
    """Whether each layer has experts; the others have an MLP."""
    by_sigmoid: bool = False
    """Weights are sigmoids of logits, and experts are selected with an untrained bias; otherwise weights are
    a softmax."""
    scaling: float | None = None
    """Scaling factor of the weights; None: 1."""
    groups: int | None = None
    """Groups of experts: a token first chooses `chosen_groups` of them; None: no groups."""
    chosen_groups: int | None = None
    shared: int | None = None
    """Total columns of the shared experts; None: there are none."""
    shared_gate: bool = False
    """Whether shared experts have a gate."""


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""

    q_lora_rank: int | None
    """Rank of the query latent; None: queries are not compressed."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    """Columns of a query or key head that are not rotated."""
    qk_rope_head_dim: int
    """Columns that are rotated; all key heads share theirs."""
    v_head_dim: int
    rope_interleave: bool
    """Interleaved rotary embedding: adjacent columns form pairs; otherwise columns of the two halves do."""
    scale: float
    """Factor of the attention scores."""

    @property
    def qk_head_dim(self) -> int:
        """Columns of a head of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @classmethod
    def of(cls, config: Any) -> Latent | None:
        """None for models with another kind of attention."""
        if config.model_type not in LATENT:
            return None
        rope, mscale = config.rope_parameters, 1.0
        if rope["rope_type"] != "default" and rope["factor"] > 1:
            mscale += 0.1 * (rope.get("mscale_all_dim") or 0.0) * math.log(rope["factor"])
        return cls(
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            rope_interleave=getattr(config, "rope_interleave", True),
            scale=mscale**2 * config.qk_head_dim**-0.5,
        )


@dataclass(frozen=True)
class Architecture:
    """The sizes of a model that parallelism must divide."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    tied: bool
    """Whether the output matrix is tied to the embedding."""
    qkv_bias: bool
    norm_of_heads: bool
    """Whether queries and keys are normalised."""
    eps: float
    """Epsilon of RMSNorm."""
    mixture: Mixture | None = None
    """None: a dense model."""
    latent: Latent | None = None
    """None: queries, keys and values are not compressed."""

    @classmethod
    def of(cls, config: Any, *, field: str, path: Any) -> Architecture:
        """Raises ConfigError for a model that is not supported."""
        if rules := list(_differences(config)):
            remedy = f"{section_of(field)}.strategy=fsdp2"
            raise ConfigError([Problem(f"{field}.path", path, rule, remedy) for rule in rules])
        return cls.sizes_of(config)

    @classmethod
    def sizes_of(cls, config: Any) -> Architecture:
        """The sizes of a model of a known family, even if the engine could not compute it."""
        latent = Latent.of(config)
        return cls(
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_attention_heads if latent else config.num_key_value_heads,
            head_dim=latent.qk_head_dim if latent else head_dim_of(config),
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            vocabulary=config.vocab_size,
            tied=bool(config.tie_word_embeddings),
            qkv_bias=_qkv_bias(config),
            norm_of_heads=config.model_type in ("qwen3", "qwen3_moe")
            or getattr(config, "use_qk_norm", False),
            eps=config.rms_norm_eps,
            mixture=_mixture(config),
            latent=latent,
        )

    def require_divisible(self, settings: MegatronConfig, *, section: str) -> None:
        """Raises ConfigError for parallel sizes that do not divide the model. `section`: the role's. With
        context parallelism each rank attends with a share of its heads; key-value heads are repeated as
        needed."""
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
        """(key, size, number that it must divide, description of that number)."""
        tensor, stages = settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size
        heads = f"{self.heads} attention heads and the {self.kv_heads} key-value heads"
        yield "tensor_model", tensor, math.gcd(self.heads, self.kv_heads), heads
        if self.mixture is None or not all(self.mixture.layers):
            yield "tensor_model", tensor, self.intermediate, f"{self.intermediate} columns of an MLP"
        own = max(1, self.heads // tensor)
        heads = f"{own} attention heads of each tensor-parallel rank"
        yield "context", settings.context_parallel_size, own, heads
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
        what = f"{mixture.width} columns of an expert"
        yield "expert_tensor", settings.expert_tensor_size, mixture.width, what
        if mixture.shared is not None:
            what = f"{mixture.shared} columns of the shared experts"
            yield "tensor_model", settings.tensor_model_parallel_size, mixture.shared, what


def _indivisible(key: str, size: int, count: int, what: str) -> Problem:
    near = sorted(divisors(count), key=lambda one: abs(one - size))[:2]
    return Problem(
        key, size, f"must divide the {what} of the model", " or ".join(f"{key}={one}" for one in near)
    )


def head_dim_of(config: Any) -> int:
    """Columns of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def section_of(field: str) -> str:
    """The section of the role that owns this model section."""
    return "critic" if field.startswith("critic") else "actor_rollout_ref.actor"


def _qkv_bias(config: Any) -> bool:
    if config.model_type == "glm4_moe":
        return bool(config.attention_bias)
    return config.model_type == "qwen2" or getattr(config, "qkv_bias", False)


def _mixture(config: Any) -> Mixture | None:
    kind, layers = config.model_type, config.num_hidden_layers
    if kind == "mixtral":
        chosen, width = config.num_experts_per_tok, config.intermediate_size
        return Mixture(config.num_local_experts, chosen, width, True, (True,) * layers)
    if kind in ("qwen2_moe", "qwen3_moe"):
        step, dense = config.decoder_sparse_step, config.mlp_only_layers
        return Mixture(
            count=config.num_experts,
            chosen=config.num_experts_per_tok,
            width=config.moe_intermediate_size,
            normalised=config.norm_topk_prob,
            layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
            shared=config.shared_expert_intermediate_size if kind == "qwen2_moe" else None,
            shared_gate=kind == "qwen2_moe",
        )
    return _mixture_of_deepseek(config) if kind in (*LATENT, "glm4_moe") else None


def _mixture_of_deepseek(config: Any) -> Mixture:
    """Experts of DeepSeek's models and GLM's. DeepSeek-V2's weights are a softmax and never normalised."""
    numbers = range(config.num_hidden_layers)
    kinds = getattr(config, "mlp_layer_types", None)
    by_sigmoid = config.model_type != "deepseek_v2"
    grouped = (
        config.topk_method == "group_limited_greedy"
        if not by_sigmoid
        else (config.n_group or 1) > (config.topk_group or 1)
    )
    return Mixture(
        count=config.n_routed_experts,
        chosen=config.num_experts_per_tok,
        width=config.moe_intermediate_size,
        normalised=by_sigmoid and config.norm_topk_prob,
        layers=tuple(
            kinds[number] == "sparse" if kinds else number >= config.first_k_dense_replace
            for number in numbers
        ),
        by_sigmoid=by_sigmoid,
        scaling=config.routed_scaling_factor,
        groups=config.n_group if grouped else None,
        chosen_groups=config.topk_group if grouped else None,
        shared=config.n_shared_experts * config.moe_intermediate_size,
    )


def _differences(config: Any) -> Iterator[str]:
    """Features of the model that this engine would compute differently from transformers."""
    if config.model_type not in FAMILIES:
        yield f"the Megatron engine supports {', '.join(FAMILIES)} models, not {config.model_type}"
        return
    if any(window_of(config, layer) is not None for layer in range(config.num_hidden_layers)):
        yield "the Megatron engine does not support sliding-window attention"
    has_bias = getattr(config, "attention_bias", False) and config.model_type != "glm4_moe"
    if has_bias or getattr(config, "mlp_bias", False):
        yield f"the Megatron engine does not support biases in a {config.model_type} model"
    if getattr(config, "router_jitter_noise", 0.0):
        yield "the Megatron engine does not support noise in routers (router_jitter_noise)"
    mixture = _mixture(config)
    if mixture and mixture.normalised and mixture.chosen == 1:
        yield "the Megatron engine does not support a top-1 router, whose normalised weight is always 1"
    if mixture and not any(mixture.layers):
        yield "the Megatron engine does not support a mixture of experts in which no layer has experts"
    if mixture and mixture.groups is not None:
        yield from _differences_of_groups(mixture)
    if config.hidden_act != "silu":
        yield f"the Megatron engine does not support the activation {config.hidden_act}"
    rotary = (*ROTARY, "yarn") if config.model_type in LATENT else ROTARY
    if (kind := config.rope_parameters["rope_type"]) not in rotary:
        yield f"the Megatron engine does not support rotary embeddings of type {kind}"
    rotated = ({"partial_rotary_factor": 1.0} | config.rope_parameters)["partial_rotary_factor"]
    if rotated != 1.0 and config.model_type != "glm4_moe":
        yield "the Megatron engine does not support partial rotary embeddings"


def _differences_of_groups(mixture: Mixture) -> Iterator[str]:
    """Megatron-Core derives from other sizes how many experts score a group; in the models it is fixed."""
    counted, wanted = mixture.chosen // (mixture.chosen_groups or 1), 2 if mixture.by_sigmoid else 1
    if counted != wanted:
        yield (
            f"the Megatron engine scores a group of experts by its best {counted} (num_experts_per_tok"
            f" / topk_group), but this model by its best {wanted}"
        )
