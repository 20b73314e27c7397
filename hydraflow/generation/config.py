"""Configuration of the generation engines. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ValSamplingConfig:
    """How validation samples."""

    n: int = 1
    """Responses per held-out prompt."""
    do_sample: bool = False
    """Sample instead of taking the most probable token."""
    temperature: float = 0.0
    """Divides the logits when do_sample; 0 is greedy."""
    top_k: int = -1
    """Keep only so many most probable tokens; -1: all."""
    top_p: float = 1.0
    """Keep the most probable tokens that together reach this probability."""


@dataclass
class SamplingConfig:
    """How responses are sampled."""

    name: str = "native"
    """Generation engine: native or vllm."""
    n: int = 1
    """Responses per prompt."""
    temperature: float = 1.0
    """Divides the logits; training log-probabilities use it too."""
    top_k: int = -1
    """Keep only so many most probable tokens; -1: all."""
    top_p: float = 1.0
    """Keep the most probable tokens that together reach this probability."""
    ignore_eos: bool = False
    """Go on to max_response_length after an end token."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a response, besides the model's own end tokens."""
    max_num_seqs: int = 1024
    """Sequences per rollout process that are decoded at the same time."""
    dtype: str = "auto"
    """Type in which the engine computes: auto (as actor.fsdp_config.dtype), fp32, bf16, fp16, fp64."""


@dataclass
class AgentConfig:
    """Processes that lead conversations with tools and environments."""

    num_workers: int = 8
    """How many; each takes a part of a step's trajectories."""


@dataclass
class EngineKwargs:
    """Arguments that go to a generation engine as they are."""

    vllm: dict[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's engine, by its own names."""


@dataclass
class RolloutConfig(SamplingConfig):
    """How responses are sampled for training and validation, and how their log-probabilities are computed
    again."""

    log_prob_micro_batch_size_per_gpu: int | None = None
    """Trajectories per data rank in a forward that recomputes log-probabilities; null: fits the token
    budget."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Fill those micro-batches by tokens; null: actor.use_dynamic_bsz."""
    log_prob_max_token_len_per_gpu: int | None = None
    """Tokens per device in that forward; null: actor.ppo_max_token_len_per_gpu."""
    tensor_model_parallel_size: int = 1
    """Devices that share each matrix in one replica of the generation engine."""
    data_parallel_size: int = 1
    """Data-parallel ranks inside one replica."""
    pipeline_model_parallel_size: int = 1
    """Devices in a row in one replica, each with a part of the layers."""
    gpu_memory_utilization: float = 0.5
    """Share of a device's memory that the engine takes for weights, activations and key-value cache."""
    max_num_batched_tokens: int = 8192
    """Tokens that one replica processes in one forward."""
    max_model_len: int | None = None
    """Longest row in tokens that the engine prepares for; null: data.max_prompt_length +
    data.max_response_length."""
    update_weights_bucket_megabytes: int = 2048
    """Weights travel to the engine in buckets of this many megabytes."""
    nnodes: int = 0
    """Machines of a rollout that has devices of its own; 0: it shares the trainer's."""
    n_gpus_per_node: int = 8
    """Devices on each of those machines."""
    device_mapping: Any = None
    """Devices of the role; null: the actor's, or those of rollout.nnodes."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    engine_kwargs: EngineKwargs = field(default_factory=EngineKwargs)
    probs_diff_limit: float = 0.05
    """Training stops at step 1 if sampled tokens' probabilities differ by more, on average, between engine
    and trainer."""
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)
