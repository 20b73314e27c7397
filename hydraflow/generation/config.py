"""Configuration of the generation engines. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydraflow.options import (
    NO_LIMIT_OR_COUNT,
    NOT_NEGATIVE,
    Named,
    Planned,
    idle_when,
    option,
    unless,
    unread,
)


@dataclass(frozen=True)
class Engine(Named):
    """A generation engine; its class has what `generation.base.GenerationEngine` asks for."""

    divides_models: bool = False
    """One replica may take several devices (tensor_model_parallel_size and its like)."""


GENERATION_ENGINES = {
    "native": Engine("hydraflow.generation.native:NativeEngine.from_config"),
    "vllm": Engine(
        reads=(
            *("engine_kwargs", "gpu_memory_utilization", "max_num_batched_tokens", "max_model_len"),
            "update_weights_bucket_megabytes",
        ),
        planned="sample with vLLM",
        divides_models=True,
    ),
}
"""By the name that `rollout.name` gives; `reads` are keys of `rollout`."""

MORE_DEVICES = Planned(lambda value: value > 1, "give each replica of the rollout {value} times the devices")
ANOTHER_PLACE = Planned(
    lambda value: value is not None, "place the role on these devices instead of all of the trainer's"
)
VALIDATION_IS_GREEDY = unless("do_sample", why="{s}.do_sample=false takes the most probable token")


@dataclass
class ValSamplingConfig:
    """How validation samples."""

    n: int = 1
    """Responses per held-out prompt."""
    do_sample: bool = False
    """Sample instead of taking the most probable token."""
    temperature: float = option(0.0, rule=NOT_NEGATIVE, idle=VALIDATION_IS_GREEDY)
    """Divides the logits when do_sample; 0 is greedy."""
    top_k: int = option(-1, rule=NO_LIMIT_OR_COUNT, idle=VALIDATION_IS_GREEDY)
    """Keep only so many most probable tokens; -1: all."""
    top_p: float = option(1.0, gt=0, le=1, idle=VALIDATION_IS_GREEDY)
    """Keep the most probable tokens that together reach this probability."""


@dataclass
class SamplingConfig:
    """How responses are sampled."""

    name: str = option("native", choices=GENERATION_ENGINES)
    """Generation engine: native or vllm."""
    n: int = option(1, ge=1, in_plan=True)
    """Responses per prompt."""
    temperature: float = option(1.0, rule=NOT_NEGATIVE)
    """Divides the logits; training log-probabilities use it too."""
    top_k: int = option(
        -1,
        rule=NO_LIMIT_OR_COUNT,
        idle=idle_when(
            lambda s: s.temperature == 0,
            "{s}.temperature=0 takes the most probable token",
            "{s}.temperature=1.0",
        ),
    )
    """Keep only so many most probable tokens; -1: all."""
    top_p: float = option(
        1.0,
        gt=0,
        le=1,
        idle=idle_when(
            lambda s: s.temperature == 0,
            "{s}.temperature=0 takes the most probable token",
            "{s}.temperature=1.0",
        ),
    )
    """Keep the most probable tokens that together reach this probability."""
    ignore_eos: bool = False
    """Go on to max_response_length after an end token."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a response, besides the model's own end tokens."""
    max_num_seqs: int = option(1024, ge=1, shapes_training=False)
    """Sequences per rollout process that are decoded at the same time."""
    dtype: str = option("auto", choices=("auto", "fp32", "bf16", "fp16", "fp64"))
    """Type in which the engine computes: auto (as actor.fsdp_config.dtype), fp32, bf16, fp16, fp64."""


@dataclass
class AgentConfig:
    """Processes that lead conversations with tools and environments."""

    num_workers: int = option(8, shapes_training=False)
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

    log_prob_micro_batch_size_per_gpu: int | None = option(None, shapes_training=False)
    """Trajectories per data rank in a forward that recomputes log-probabilities; null: fits the token
    budget."""
    log_prob_use_dynamic_bsz: bool | None = option(None, shapes_training=False)
    """Fill those micro-batches by tokens; null: actor.use_dynamic_bsz."""
    log_prob_max_token_len_per_gpu: int | None = option(None, shapes_training=False)
    """Tokens per device in that forward; null: actor.ppo_max_token_len_per_gpu."""
    tensor_model_parallel_size: int = option(1, shapes_training=False, planned=MORE_DEVICES)
    """Devices that share each matrix in one replica of the generation engine."""
    data_parallel_size: int = option(1, shapes_training=False, planned=MORE_DEVICES)
    """Data-parallel ranks inside one replica."""
    pipeline_model_parallel_size: int = option(1, shapes_training=False, planned=MORE_DEVICES)
    """Devices in a row in one replica, each with a part of the layers."""
    gpu_memory_utilization: float = option(
        0.5, gt=0, lt=1, shapes_training=False, idle=unread(GENERATION_ENGINES, "name")
    )
    """Share of a device's memory that the engine takes for weights, activations and key-value cache."""
    max_num_batched_tokens: int = option(8192, shapes_training=False, idle=unread(GENERATION_ENGINES, "name"))
    """Tokens that one replica processes in one forward."""
    max_model_len: int | None = option(None, shapes_training=False, idle=unread(GENERATION_ENGINES, "name"))
    """Longest row in tokens that the engine prepares for; null: data.max_prompt_length +
    data.max_response_length."""
    update_weights_bucket_megabytes: int = option(
        2048, ge=1, shapes_training=False, idle=unread(GENERATION_ENGINES, "name")
    )
    """Weights travel to the engine in buckets of this many megabytes."""
    nnodes: int = option(
        0,
        ge=0,
        shapes_training=False,
        planned=Planned(lambda value: value > 0, "give the rollout {value} machines of its own"),
    )
    """Machines of a rollout that has devices of its own; 0: it shares the trainer's."""
    n_gpus_per_node: int = option(
        8,
        shapes_training=False,
        idle=idle_when(
            lambda s: s.nnodes == 0, "{s}.nnodes=0: the rollout shares the trainer's devices", "{s}.nnodes=1"
        ),
    )
    """Devices on each of those machines."""
    device_mapping: Any = option(
        None,
        shapes_training=False,
        planned=ANOTHER_PLACE,
    )
    """Devices of the role; null: the actor's, or those of rollout.nnodes."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    engine_kwargs: EngineKwargs = option(
        factory=EngineKwargs, shapes_training=False, idle=unread(GENERATION_ENGINES, "name")
    )
    probs_diff_limit: float = option(0.05, gt=0, shapes_training=False)
    """Training stops at step 1 if sampled tokens' probabilities differ by more, on average, between engine
    and trainer."""
    val_kwargs: ValSamplingConfig = option(factory=ValSamplingConfig, shapes_training=False)
