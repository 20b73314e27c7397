"""The generation engine that samples with its own SGLang server (`rollout.name=sglang`).

In: prompts, sampling settings, and a stream of weights. Out: responses with the log-probability of every
token, under the one convention of all engines: softmax(logits / temperature), before top-k and top-p. That is
what SGLang 0.5.23 returns unless SGLANG_RETURN_ORIGINAL_LOGPROB is set (`sglang/srt/layers/sampler.py`:
`log(probs)` of the scaled logits, before they are filtered; at temperature 0, log_softmax of the logits).
Each response is one request to /generate, in a thread that waits for it. Weights go through
/update_weights_from_disk, whose files hold no code.
Left out on purpose: the text of responses, and reading weights back: /get_weights_by_name gives those of some
models only, as decimal text.
"""

from __future__ import annotations

import copy
import shutil
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from transformers import PreTrainedConfig, PreTrainedModel, TokenizersBackend

from hydraflow.errors import ConfigError
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
from hydraflow.generation.config import SGLANG
from hydraflow.generation.native import end_tokens
from hydraflow.generation.requests import Limits, aborted, engine_context, finite, sample_batch, seed_of
from hydraflow.generation.sglang_server import SglangServer, flags
from hydraflow.generation.sglang_weights import WeightFiles, private_folder
from hydraflow.generation.stopping import watched
from hydraflow.generation.weights import Arrivals
from hydraflow.models.config_keys import without_ignored
from hydraflow.models.loading import unfilled_model
from hydraflow.weights.buckets import Weight

SILENCE_SECONDS = 300.0
"""A server that neither completes a response nor is healthy for this long has failed."""
LOOK_SECONDS = 10.0
"""After this long without a response, the server's health is checked."""
CALL_SECONDS = 600.0
"""Time limit for loading weights, and for releasing or allocating memory."""
ABORT_SECONDS = 0.2
"""After this long an abort is repeated: the server ignores it for requests that it has not read yet."""
IDLE_SECONDS = 60
"""Time limit for the server to notice that nothing is in flight."""
SPARE_TOKENS = 2
"""SGLang samples up to two tokens fewer than fit into its context (`Scheduler.init_req_max_new_tokens`,
`TpModelWorker.get_worker_info`)."""


@dataclass(frozen=True)
class _Flight:
    """A request that has been sent to the server, or is about to be."""

    rid: str
    """Its id on the server. No id is a prefix of another, because an abort ends all ids that start with
    it."""
    request: TokenRequest
    answer: Future[Any] = field(default_factory=Future)
    """The response of /generate."""


class SglangEngine:
    """A `GenerationEngine` in front of a server."""

    def __init__(self, server: SglangServer, model: PreTrainedModel, files: WeightFiles, spec: EngineSpec):
        """server: has the model's shape, but not its weights. files: its weights, on their way to the server.
        spec: how the server was built; it has the same tokenizer."""
        self._server, self._files = server, files
        self._eos = end_tokens(spec.generation_config or model.generation_config, model.config)
        context = engine_context(spec.rollout.max_model_len or spec.longest_row)
        embeddings: Any = model.get_input_embeddings()
        self._limits = Limits(context, embeddings.num_embeddings, spec.tokenizer)
        self._not_ready = NO_WEIGHTS
        self._sleeps = False
        self._numbers, self._most_flights = count(), spec.rollout.max_num_seqs
        self._queue: dict[str, TokenRequest] = {}
        """Requests that the caller has submitted and the server does not have yet."""
        self._flights: dict[str, _Flight] = {}

    def generate(self, request: GenerationRequest, params: SamplingParams) -> GenerationOutput:
        """See `GenerationEngine`. EnvironmentFault: the server has failed."""
        self._limits.require(request.prompts, params)
        return sample_batch(self, request, params)

    def submit(self, requests: Sequence[TokenRequest]) -> None:
        if self._not_ready:
            raise RuntimeError(self._not_ready)
        self._limits.require_all(requests)
        self._queue |= {one.name: one for one in requests}
        self._launch()

    def advance(self) -> list[Completion]:
        """See `GenerationEngine`. Errors as in `generate`."""
        if not self._flights:
            return []
        silent_since = time.monotonic()
        while not (ended := self._ended()):
            if self._server.is_healthy():
                silent_since = time.monotonic()
            elif (seconds := time.monotonic() - silent_since) > SILENCE_SECONDS:
                self._server.give_up(f"has answered nothing for {seconds:.0f} seconds")
        return self._land(ended)

    def abort(self, names: Collection[str]) -> list[Completion]:
        """See `GenerationEngine`. Responses that complete before the abort are returned as complete."""
        waiting = [aborted(name) for name in names if self._queue.pop(name, None) is not None]
        started = [name for name in names if name in self._flights]
        if self._server.over:
            self._flights.clear()
            return waiting
        deadline = time.monotonic() + CALL_SECONDS
        while left := [name for name in started if not self._flights[name].answer.done()]:
            if time.monotonic() > deadline:
                self._server.give_up(f"has not aborted {len(left)} requests in {CALL_SECONDS:g} seconds")
            self._ask_to_abort(left)
            wait([self._flights[name].answer for name in left], ABORT_SECONDS)
        return waiting + self._land(started)

    def update_weights(self, stream: Iterable[Weight], *, first: bool = True, last: bool = True) -> None:
        """See `GenerationEngine`. The server loads all weights at once, after the last call."""
        if self._flights:
            raise RuntimeError(f"{len(self._flights)} requests are in flight: abort them before new weights")
        self._not_ready = MIXED_WEIGHTS
        if first:
            self._files.remove()
            self._files.arrivals.forget()
        self._files.write(stream)
        if last:
            self._files.arrivals.require_all()
            self._load()
            self._not_ready = ""

    def sleep(self) -> None:
        self._not_ready = ASLEEP
        if not self._sleeps:
            self._become_idle()
            self._server.post("/release_memory_occupation", {}, seconds=CALL_SECONDS)
            self._sleeps = True

    def _load(self) -> None:
        """Makes the server load the files, then removes them."""
        if self._sleeps:
            self._server.post("/resume_memory_occupation", {}, seconds=CALL_SECONDS)
            self._sleeps = False
        self._become_idle()
        asked = {"model_path": str(self._files.folder), "load_format": "safetensors", "flush_cache": True}
        answer = self._server.post("/update_weights_from_disk", asked, seconds=CALL_SECONDS)
        if not answer["success"]:
            raise RuntimeError(f"SGLang did not load the weights: {answer['message']}")
        self._files.remove()

    def _become_idle(self) -> None:
        """Makes the server drop its cache once it has noticed that nothing is in flight. If asked to release
        memory earlier, it fails an assertion."""
        self._server.post(f"/flush_cache?timeout={IDLE_SECONDS}", {}, seconds=CALL_SECONDS)

    def _ended(self) -> list[str]:
        """Requests that have ended; [] if none does within LOOK_SECONDS."""
        answers = [flight.answer for flight in self._flights.values()]
        wait(answers, LOOK_SECONDS, return_when=FIRST_COMPLETED)
        return [name for name, flight in self._flights.items() if flight.answer.done()]

    def _land(self, names: Sequence[str]) -> list[Completion]:
        """Completions of requests that have ended; they are no longer in flight. Raises the error of one that
        failed."""
        landed = [self._flights.pop(name) for name in names]
        self._launch()
        return [
            self._ended_at_string(one.request, _completion(one.request, one.answer.result()))
            for one in landed
        ]

    def _ended_at_string(self, one: TokenRequest, sampled: Completion) -> Completion:
        """Drops the tokens after a stop string: the server checks for one only every few tokens."""
        if not one.params.stop:
            return sampled
        response = watched(self._limits.tokenizer, one.params, one.prompt.tolist(), one.sampled)
        if (length := response.length(sampled.tokens.tolist())) is None:
            return sampled
        return Completion(one.name, sampled.tokens[:length], sampled.log_probs[:length], STOP)

    def _ask_to_abort(self, names: Sequence[str]) -> None:
        if len(names) == len(self._flights):
            self._server.post("/abort_request", {"abort_all": True}, seconds=CALL_SECONDS)
            return
        for name in names:
            self._server.post("/abort_request", {"rid": self._flights[name].rid}, seconds=CALL_SECONDS)

    def _launch(self) -> None:
        """Sends requests, each from its own daemon thread."""
        while self._queue and len(self._flights) < self._most_flights:
            name = next(iter(self._queue))
            flight = _Flight(f"{next(self._numbers):016d}", self._queue.pop(name))
            self._flights[name] = flight
            threading.Thread(target=self._ask, args=(flight,), daemon=True).start()

    def _ask(self, flight: _Flight) -> None:
        """Requests one response and waits for it."""
        asked = {
            "rid": flight.rid,
            "input_ids": flight.request.context.tolist(),
            "sampling_params": self._sampling_params(flight.request),
            "return_logprob": True,
            "logprob_start_len": -1,  # of the response alone
        }
        try:
            flight.answer.set_result(self._server.post("/generate", asked))
        except BaseException as error:  # the caller that waits for the answer raises it
            flight.answer.set_exception(error)

    def _sampling_params(self, one: TokenRequest) -> dict[str, Any]:
        params = one.left
        return {
            "max_new_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k or -1,  # SGLang refuses 0
            "top_p": params.top_p,
            # the model's end tokens too, which the server does not know; its ignore_eos would ignore all
            "stop_token_ids": params.all_stop_tokens(self._eos),
            "stop": list(params.stop),
            "skip_special_tokens": False,
            # read with --enable-deterministic-inference only; then each position has its own draw, and a
            # continued response equals an uninterrupted one
            "sampling_seed": seed_of(one.key, one.sample),
        }


def build(config: PreTrainedConfig, spec: EngineSpec) -> SglangEngine:
    """The engine of a rollout process. ConfigError: another version of SGLang than needed. EnvironmentFault:
    its server does not start."""
    _require_version(spec.section)
    model = unfilled_model(config, device="meta", dtype=spec.dtype, trust=spec.trust_remote_code)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    folder = private_folder(nbytes, max(1, spec.processes // spec.model_parallel))
    try:
        _save(config, type(model).__name__, spec.tokenizer, folder)
        start = 0.9 * spec.start_seconds  # its error comes before the trainer's
        server = SglangServer(flags(arguments(folder, spec)), folder=folder, start_seconds=start)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return SglangEngine(server, model, WeightFiles(folder, Arrivals(model), spec.dtype), spec)


def arguments(folder: Path, spec: EngineSpec) -> Mapping[str, Any]:
    """SGLang's arguments besides host and port; `generation.config.SGLANG_ARGUMENTS` lists those that users
    cannot give."""
    rollout, on_cpu = spec.rollout, spec.device.type == "cpu"
    graphs = "disabled" if (on_cpu if rollout.enforce_eager is None else rollout.enforce_eager) else None
    return {
        "model_path": folder,
        "skip_tokenizer_init": spec.tokenizer is None,
        "load_format": "dummy",  # the actor's weights come before the first request
        "dtype": str(spec.dtype).removeprefix("torch."),
        "random_seed": spec.seed,
        "context_length": (rollout.max_model_len or spec.longest_row) + SPARE_TOKENS,
        "max_running_requests": rollout.max_num_seqs,
        "mem_fraction_static": rollout.gpu_memory_utilization,
        "disable_radix_cache": not rollout.enable_prefix_caching,
        "cuda_graph_backend_decode": graphs,
        "cuda_graph_backend_prefill": graphs,
        "enable_memory_saver": not on_cpu,
        "device": spec.device.type,
        "base_gpu_id": spec.device.index,
        **rollout.engine_kwargs.sglang,
    }


def _require_version(section: str) -> None:
    found = SGLANG.version
    if not found or Version(found) < Version(SGLANG.minimum):
        rule = f"needs SGLang {SGLANG.minimum} or newer; {found or 'none'} is installed"
        raise ConfigError.one(
            f"{section}.name", "sglang", rule, f"{SGLANG.install}; or {section}.name=native"
        )


def _save(
    config: PreTrainedConfig, architecture: str, tokenizer: TokenizersBackend | None, folder: Path
) -> None:
    """Writes the configuration and the tokenizer, without end tokens: each request has its own."""
    saved = without_ignored(config)
    saved.architectures = [architecture]
    for part in (saved, saved.get_text_config()):
        part.eos_token_id = None
    saved.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.eos_token = None
        tokenizer.save_pretrained(folder)


def _completion(one: TokenRequest, answer: Mapping[str, Any]) -> Completion:
    """From an answer of /generate: `meta_info.output_token_logprobs` has (log-probability, token, text) of
    each token, and null for a log-probability that is not a number."""
    facts = answer["meta_info"]
    reason = facts["finish_reason"]["type"]
    pairs = facts.get("output_token_logprobs") or []
    tokens = [token for _, token, *_ in pairs]
    if reason not in (STOP, LENGTH, ABORT):
        raise RuntimeError(f"SGLang ended a request with {facts['finish_reason']}")
    if reason != ABORT and tokens != answer["output_ids"]:
        lengths = f"{len(answer['output_ids'])} tokens and {len(tokens)} log-probabilities"
        raise RuntimeError(f"SGLang returned {lengths} that do not match")
    if reason == LENGTH and len(tokens) != one.left.max_tokens:
        why = "its KV cache has no room for the longest row; raise rollout.gpu_memory_utilization"
        raise RuntimeError(f"SGLang ended a response at {len(tokens)} of {one.left.max_tokens} tokens: {why}")
    log_probs = finite([float("nan") if value is None else value for value, *_ in pairs])
    return Completion(one.name, torch.tensor(tokens, dtype=torch.int64), log_probs, reason)
