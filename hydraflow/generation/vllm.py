"""The generation engine that runs vLLM in this process (`rollout.name=vllm`).

In: prompts, sampling settings, and a stream of weights. Out: responses with the log-probability of every
token, under the one convention of all engines: softmax(logits / temperature), before top-k and top-p. vLLM
batches the requests, shares the prompts' cache and maps Hugging Face names to its own; `vllm_worker.py` runs
next to the model. `LLMEngine` is driven by the calls here. `AsyncLLM` would start another process for each
engine, which would outlive a killed worker together with its shared memory. Left out on purpose: vLLM's
tokenizer loading, its server, and its statistics.
"""

from __future__ import annotations

import itertools
import operator
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hydraflow.device import collective_backend
from hydraflow.errors import ConfigError, first_line
from hydraflow.generation import vllm_adapters
from hydraflow.generation.base import (
    ABORT,
    ASLEEP,
    LENGTH,
    MIXED_WEIGHTS,
    NO_WEIGHTS,
    STOP,
    Completion,
    EngineSpec,
    GenerationOutput,
    GenerationRequest,
    SamplingParams,
    TokenRequest,
)
from hydraflow.generation.config import VLLM, batched_tokens, splits_prompts
from hydraflow.generation.native import end_tokens
from hydraflow.generation.requests import Limits, engine_context, finite, sample_batch, seed_of
from hydraflow.generation.stopping import watched
from hydraflow.generation.vllm_adapters import request_of
from hydraflow.generation.vllm_executor import executor_in_group
from hydraflow.generation.vllm_experts import keep_experts_plain, record_routes
from hydraflow.generation.vllm_weights import pattern, wanted_weights
from hydraflow.generation.vllm_worker import WeightReceiver
from hydraflow.generation.weights import Arrivals, Assembly
from hydraflow.models.adapters import add_shapes, is_adapter
from hydraflow.models.config_keys import without_ignored
from hydraflow.models.loading import unfilled_model
from hydraflow.system.importing import importing
from hydraflow.weights.buckets import Weight

REQUIRED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other model runner has another sampler
}
"""Environment variables that vLLM reads while it starts."""
DEFAULTS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # replicas would all be bound to the same cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_HOST_IP": "127.0.0.1",
}
"""Defaults for variables that the user has not set."""
UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}
"""Defaults that are added in eager mode on a CPU, where vLLM would still run a C++ compiler in each process,
for single functions."""


class VllmEngine:
    """A `GenerationEngine` around vLLM's `LLMEngine`."""

    def __init__(self, engine: Any, model: PreTrainedModel, spec: EngineSpec):
        """engine: a `LLMEngine` without weights, built as `spec` says. model: the Hugging Face model, perhaps
        on the meta device, with the shapes of its adapters."""
        self._engine, self._records = engine, spec.routes
        self._eos = end_tokens(spec.generation_config or model.generation_config, model.config)
        self._recorded: dict[str, tuple[str, int]] = {}
        """For each request in flight with experts requested: vLLM's request id, and the number of tokens that
        it started with."""
        engine.output_processor.tokenizer = spec.tokenizer  # for stop strings; the engine needs no other
        self._arrivals, self._assembly = Arrivals(model), Assembly()
        self._not_ready = NO_WEIGHTS
        self._wanted = wanted_weights(model, self._arrivals)
        self._adapters, self._adapter = spec.adapters, 0
        """The second is the id of the adapter for new requests; 0: none."""
        self._adapter_tensors: dict[str, Tensor] = {}
        """Tensors of the next adapter, as they arrive."""
        self._base_comes = False
        """Whether the current update includes base weights."""
        of_model = engine.model_config
        context, vocabulary = engine_context(of_model.max_model_len), of_model.get_vocab_size()
        self._limits = Limits(context, vocabulary, spec.tokenizer)
        config = engine.vllm_config
        # vLLM rewinds the generator after each chunk of a prompt but the last, which CPU generators cannot do
        self._seeds = not (
            config.device_config.device_type == "cpu" and config.scheduler_config.enable_chunked_prefill
        )
        engine.input_processor.assign_request_id = partial(_assign_id, itertools.count())
        self._rpc(WeightReceiver.hydraflow_prepare)

    def generate(self, request: GenerationRequest, params: SamplingParams) -> GenerationOutput:
        self._check(request.prompts, params)
        return sample_batch(self, request, params)

    def submit(self, requests: Sequence[TokenRequest]) -> None:
        """See `GenerationEngine`. A continued response gets different random draws than an uninterrupted
        one."""
        from vllm.inputs.engine import tokens_input

        if self._not_ready:
            raise RuntimeError(self._not_ready)
        for one in requests:
            self._check([one.prompt], one.params)
        for one in requests:
            seed = seed_of(one.key, one.sample, len(one.sampled)) if self._seeds else None
            how = self._sampling_params(one.left, seed)
            adapter = request_of(self._adapter) if self._adapter else None
            self._engine.add_request(one.name, tokens_input(one.context.tolist()), how, lora_request=adapter)
            if one.params.stop:
                self._watch(one)
            if one.params.routes:
                (inner,) = self._engine.output_processor.external_req_ids[one.name]
                self._recorded[one.name] = inner, len(one.context)

    def advance(self) -> list[Completion]:
        """See `GenerationEngine`. FloatingPointError: log-probabilities are not numbers."""
        while self._engine.has_unfinished_requests():
            if ended := [self._completion(output) for output in self._engine.step() if output.finished]:
                return ended
        return []

    def abort(self, names: Collection[str]) -> list[Completion]:
        from vllm.v1.engine import FinishReason

        known = self._engine.output_processor
        inner = [inner for name in names for inner in known.external_req_ids.get(name, ())]
        states = [known.request_states[one] for one in inner]
        outputs = [
            state.make_request_output(
                new_token_ids=[], pooling_output=None, finish_reason=FinishReason.ABORT, stop_reason=None
            )
            for state in states
        ]
        self._engine.abort_request(list(names))
        return [self._completion(output) for output in outputs]

    def update_weights(self, stream: Iterable[Weight], *, first: bool = True, last: bool = True) -> None:
        """See `GenerationEngine`. vLLM's loader takes full tensors, so parts are assembled here. At the end
        the KV cache of the old weights is cleared as well: masked attention still multiplies it, and NaN
        times 0 is NaN."""
        self._not_ready = MIXED_WEIGHTS
        if first:
            self._arrivals.forget(is_adapter if self._adapters else None)
            self._adapter_tensors, self._base_comes = {}, False
            self._rpc(WeightReceiver.hydraflow_wake_weights)
        self._rpc(WeightReceiver.hydraflow_load_weights, self._without_adapters(self._checked(stream)))
        if last:
            self._arrivals.require_all()
            self._load_adapter()
            self._rpc(WeightReceiver.hydraflow_pack_weights, self._base_comes)
            self._rpc(WeightReceiver.hydraflow_clear_cache)
            if not self._engine.reset_prefix_cache():
                raise RuntimeError("vLLM kept the cache of old weights: requests are still running")
            self._not_ready = ""

    def sleep(self) -> None:
        self._not_ready = ASLEEP
        self._rpc(WeightReceiver.hydraflow_rest, self._adapters is not None)

    def held(self) -> Mapping[str, Tensor]:
        """See `GenerationEngine`. Read from vLLM's own parameters, in which q, k and v are one tensor, and
        gate and up are one."""
        return self._rpc(WeightReceiver.hydraflow_read_weights, self._wanted)

    def require_readable(self) -> None:
        """Loads a test pattern as weights and reads it back. ValueError names a weight that vLLM does not
        know, or transforms, so that it could never be compared with the trainer's."""
        wanted, known = self._wanted.items(), self._arrivals.known
        sent = pattern({name: known[name] for name, weight in wanted if weight.tied_to is None})
        copies = ((name, tensor.clone()) for name, tensor in sent.items())
        self._rpc(WeightReceiver.hydraflow_load_weights, self._without_adapters(copies))
        self._load_adapter()
        held = self.held()
        for name, weight in wanted:
            expected = sent.get(weight.tied_to or name)
            if expected is not None and not torch.equal(held[name].cpu(), expected):
                raise ValueError(f"weight {name} is not read back as it was loaded")

    def _rpc(self, method: Callable[..., Any], *args: Any) -> Any:
        (answer,) = self._engine.collective_rpc(method.__name__, args=args)
        return answer

    def _load_adapter(self) -> None:
        """Activates the adapter that has arrived, under a new id (see `vllm_adapters.py`)."""
        if self._adapters is None:
            return
        self._adapter += 1
        tensors, self._adapter_tensors = self._adapter_tensors, {}
        self._rpc(WeightReceiver.hydraflow_load_adapter, self._adapter, self._adapters.rank, tensors)

    def _without_adapters(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Keeps the tensors of the adapter for `_load_adapter`."""
        for name, tensor in weights:
            if is_adapter(name):
                self._adapter_tensors[name] = tensor
            else:
                yield name, tensor

    def _checked(self, stream: Iterable[Weight]) -> Iterator[tuple[str, Tensor]]:
        """The stream for vLLM's loader: full tensors, tied ones once. Copies, because the stream is borrowed
        and a loader may keep tensors until a fused layer is complete."""
        for name, sent in stream:
            if not self._base_comes and not is_adapter(name):
                self._base_comes = True
                self._arrivals.forget(lambda known: not is_adapter(known))
            earlier = self._arrivals.note(name, sent)
            if (tensor := self._assembly.add(sent)) is None:
                continue
            if earlier == name:
                yield self._arrivals.first_name(name), tensor
            elif not torch.equal(held := self.held()[earlier], tensor.to(held)):
                self._arrivals.refuse_other(name, earlier)

    def _watch(self, one: TokenRequest) -> None:
        """Makes vLLM detect stop strings as the other engines do: also if one began before the request was
        interrupted, or if the prompt ends within a character."""
        response = watched(self._limits.tokenizer, one.params, one.prompt.tolist(), one.sampled)
        known = self._engine.output_processor
        for inner in known.external_req_ids[one.name]:
            detokenizer = known.request_states[inner].detokenizer
            detokenizer.stream, detokenizer.output_text = response.stream, response.text

    def _completion(self, output: Any) -> Completion:
        (one,) = output.outputs
        if one.finish_reason not in (STOP, LENGTH, ABORT):
            raise RuntimeError(f"vLLM ended a request with {one.finish_reason}")
        log_probs = finite(one.logprobs.logprobs)
        tokens, routes = torch.tensor(one.token_ids, dtype=torch.int64), None
        if output.request_id in self._recorded:
            inner, before = self._recorded.pop(output.request_id)
            routes = self._rpc(WeightReceiver.hydraflow_read_routes, inner, before + max(len(tokens) - 1, 0))
        return Completion(output.request_id, tokens, log_probs, one.finish_reason, routes)

    def _sampling_params(self, params: SamplingParams, seed: int | None) -> Any:
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

        return VllmParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=seed,
            ignore_eos=True,  # end tokens are passed as stop tokens: vLLM would read them from a file
            stop_token_ids=params.all_stop_tokens(self._eos),
            stop=list(params.stop),
            skip_special_tokens=False,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(params.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # each request has its own; vLLM would copy them deeply
        )

    def _check(self, prompts: Sequence[Tensor], params: SamplingParams) -> None:
        if params.routes and not self._records:
            raise ValueError("experts need an engine that was built to record them")
        self._limits.require(prompts, params)


def _assign_id(numbers: Iterator[int], request: Any) -> None:
    """Gives a request vLLM's own id. vLLM would make it unique by random characters, but all processes of a
    divided engine must give it the same."""
    name = request.request_id
    request.external_req_id, request.request_id = name, f"{name}-{next(numbers)}"


def build(config: PreTrainedConfig, spec: EngineSpec) -> VllmEngine:
    """The engine of a rollout process. ConfigError when vLLM does not support the model, or has the wrong
    version."""
    set_environment(compiles=spec.device.type != "cpu" or spec.rollout.enforce_eager is False)
    model = unfilled_model(config, device="meta", dtype=spec.dtype, trust=spec.trust_remote_code)
    if spec.adapters is not None:
        add_shapes(spec.adapters, model)
    with tempfile.TemporaryDirectory(prefix="hydraflow-vllm-") as folder:
        saved = without_ignored(config)
        saved.architectures = [type(model).__name__]
        saved.save_pretrained(folder)
        try:
            engine = VllmEngine(_start(folder, spec, model), model, spec)
        except (ImportError, AttributeError) as error:
            rule = f"the installed vLLM lacks an API that hydraflow uses: {first_line(error)}"
            key = f"{spec.section}.name"
            raise ConfigError.one(key, "vllm", rule, f"{VLLM.install}, or {key}=native") from error
    try:
        engine.require_readable()
    except (ValueError, LookupError, AssertionError, AttributeError) as error:
        raise _other_form(spec, type(model).__name__, first_line(error)) from error
    return engine


def set_environment(*, compiles: bool) -> None:
    """Sets the variables that vLLM reads on import. compiles: it may compile single functions in eager
    mode."""
    os.environ.update(REQUIRED)
    os.environ.pop("VLLM_PP_LAYER_PARTITION", None)  # memory estimates assume vLLM's default partition
    for name, value in (DEFAULTS if compiles else DEFAULTS | UNCOMPILED).items():
        os.environ.setdefault(name, value)


def _start(folder: str, spec: EngineSpec, model: nn.Module) -> Any:
    """A `LLMEngine` with random weights for the configuration in that folder. model: as `VllmEngine` gets
    it."""
    with importing():
        import vllm
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine
    key, found, ours = f"{spec.section}.name", str(vllm.__version__), spec.device.type
    if Version(found) < Version(VLLM.minimum):
        rule = f"needs vLLM {VLLM.minimum} or newer; {found} is installed"
        raise ConfigError.one(key, "vllm", rule, VLLM.install)
    if (theirs := current_platform.device_type) != ours:
        rule = f"the installed vLLM {found} is built for {theirs or 'no device here'}, not for {ours}"
        raise ConfigError.one(key, "vllm", rule, f"{VLLM.install}, or {key}=native")
    if ours == "cpu":
        _keep_weights_plain(compiled=spec.rollout.enforce_eager is False)
    if spec.routes:
        record_routes()
    _inspect_models_here()
    if not dist.is_initialized():
        # otherwise vLLM creates this group through a file in TMPDIR, which a killed process leaves, or a port
        dist.init_process_group(collective_backend(ours), store=dist.HashStore(), rank=0, world_size=1)
    try:
        layers = spec.adapters
        of_adapters = {} if layers is None else vllm_adapters.arguments(layers, model)
        config = vllm.EngineArgs(**arguments(folder, spec), **of_adapters).create_engine_config()
        config.parallel_config.rank = spec.rank  # its layers are those of the rank's stage
        _require_own_weights(config.model_config, spec)
        if ours == "cpu":
            _require_kernel(config.model_config.get_head_size())
            if config.cache_config.kv_cache_memory_bytes is None:
                config.cache_config.kv_cache_memory_bytes = _cache_bytes(config, spec)
        return LLMEngine.from_vllm_config(config, disable_log_stats=True)
    except ConfigError:
        raise
    except (ValueError, TypeError, NotImplementedError, AssertionError) as error:
        rule = f"vLLM {found} rejects this model or these settings: {_reason(error)}"
        raise ConfigError.one(key, "vllm", rule, f"{key}=native, or other settings") from error


def _inspect_models_here() -> None:
    """Makes vLLM inspect model classes in this process. By default it starts a subprocess for that, which
    imports vLLM again (seven CPU seconds), to keep CUDA out of the parent; here the parent is the engine."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = operator.call


def _require_own_weights(model: Any, spec: EngineSpec) -> None:
    """ConfigError for models that would pass the read-back check but fail later."""
    name = model.architectures[0]
    if model.use_mla:
        why = "its attention (MLA) caches products of weights, which would go stale"
        raise _other_form(spec, name, why)
    if model.using_transformers_backend():
        why = "it would patch the class in transformers, and this process could no longer build such models"
        raise _other_form(spec, name, why)


def _other_form(spec: EngineSpec, model: str, why: str) -> ConfigError:
    rule = f"vLLM does not hold the weights of {model} in the form in which they are sent: {why}"
    return ConfigError.one(f"{spec.section}.name", "vllm", rule, f"{spec.section}.name=native")


def _reason(error: Exception) -> str:
    """The error in one line; pydantic's errors begin with a count."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return first_line(error)
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"]))
    return f"{field}: {first['msg']}" if field else str(first["msg"])


def _require_kernel(head: int) -> None:
    """ValueError for head sizes without a kernel; vLLM would only notice in the first forward pass."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if head not in (sizes := CPUAttentionBackend.get_supported_head_sizes()):
        known = ", ".join(map(str, sizes))
        raise ValueError(f"on a CPU it has no attention for heads of size {head}, only for {known}")


def arguments(folder: str, spec: EngineSpec) -> dict[str, Any]:
    """vLLM's arguments; `generation.config.VLLM_ARGUMENTS` lists those that users cannot give."""
    rollout, on_cpu = spec.rollout, spec.device.type == "cpu"
    return {
        "model": folder,
        "skip_tokenizer_init": True,
        "load_format": "dummy",  # the actor's weights arrive before the first request
        "dtype": str(spec.dtype).removeprefix("torch."),
        "seed": spec.seed,
        "max_model_len": rollout.max_model_len or spec.longest_row,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": batched_tokens(rollout, spec.longest_row, spec.device.type),
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enforce_eager": on_cpu if rollout.enforce_eager is None else rollout.enforce_eager,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enable_chunked_prefill": splits_prompts(rollout, spec.device.type),
        "tensor_parallel_size": spec.tensor_parallel,
        "pipeline_parallel_size": spec.pipeline_parallel,
        "distributed_executor_backend": "uni" if spec.model_parallel == 1 else executor_in_group(spec.rank),
        "worker_extension_cls": f"{WeightReceiver.__module__}.{WeightReceiver.__qualname__}",
        "logprobs_mode": "raw_logprobs",
        "enable_sleep_mode": not on_cpu,
        # custom all-reduce asks the driver about other processes' devices, which are not visible here
        "disable_custom_all_reduce": spec.model_parallel > 1,
        "moe_backend": "auto" if on_cpu else "triton",  # the others repack weights
        **rollout.engine_kwargs.vllm,
    }


def _keep_weights_plain(*, compiled: bool) -> None:
    """Stops vLLM from emptying linear weights that it packs for oneDNN: updates could not come in parts. They
    are packed again after each update (`WeightReceiver.hydraflow_pack_weights`). In compiled code, which
    keeps the products of the first weights, they are not packed."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False  # packing for AMX changes biases
    _custom_ops._supports_onednn = _custom_ops._supports_onednn and not compiled
    if not isinstance(utils.dispatch_cpu_unquantized_gemm, partial):
        utils.dispatch_cpu_unquantized_gemm = partial(_pack, utils.dispatch_cpu_unquantized_gemm)
    keep_experts_plain()


def _pack(pack: Callable[..., None], layer: nn.Module, remove_weight: bool) -> None:
    """`pack` is vLLM's function; the layer keeps its weight."""
    pack(layer, remove_weight=False)


def _cache_bytes(config: Any, spec: EngineSpec) -> int:
    """Bytes of the KV cache on a CPU: enough for `max_num_seqs` rows, at most the engine's share of the
    machine's memory. vLLM would allocate all of that share."""
    model, block = config.model_config, config.cache_config.block_size
    heads, width = model.get_num_kv_heads(config.parallel_config), model.get_head_size()
    layers = model.get_num_layers(config.parallel_config)
    blocks = spec.rollout.max_num_seqs * -(-model.max_model_len // block) + 1  # vLLM never uses one block
    needed = 2 * layers * heads * width * model.dtype.itemsize * blocks * block
    share = spec.rollout.gpu_memory_utilization * psutil.virtual_memory().total / spec.processes
    return min(needed, int(share))
