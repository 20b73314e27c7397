"""The Protocol of a generation engine: turns prompts into sampled responses with the log-probability of every
token.

In: prompts as token ids, the number of samples for each, and a key per prompt that fixes its random draws.
Out: ragged responses and log-probabilities, prompt-major and sample-minor. Left out on purpose: tokenizers,
rewards, the batches of worker calls (`workers/rollout.py` converts them), and how weights get here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from hydraflow.generation.config import SamplingConfig
from hydraflow.models.adapters import AdapterLayers
from hydraflow.weights.buckets import Weight

if TYPE_CHECKING:
    from transformers import GenerationConfig, TokenizersBackend

NO_WEIGHTS = "the engine has no weights yet: call update_weights first"
MIXED_WEIGHTS = "the last update_weights failed half-way, so old and new weights are mixed: update them again"
ASLEEP = "the engine is asleep: update its weights first"
"""Why an engine cannot sample."""

STOP, LENGTH, ABORT = "stop", "length", "abort"
"""Why a response ended: an end token or a stop string, `max_tokens`, or `GenerationEngine.abort`."""

Key = tuple[str | int, ...]


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. ValueError when a number is out of range.

    >>> SamplingParams(max_tokens=8, temperature=0.0).greedy
    True
    """

    max_tokens: int
    """Maximum response length in tokens, including the end token."""
    temperature: float = 1.0
    """Sampling temperature, which divides the logits; 0 is greedy."""
    top_k: int = -1
    """Sample from the k most probable tokens (plus ties with the k-th); -1 or 0: all."""
    top_p: float = 1.0
    """Nucleus sampling: the most probable tokens that together reach this probability, after `top_k`."""
    ignore_eos: bool = False
    """Ignore the model's own end tokens. `stop_token_ids` still end a response."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, besides the model's own."""
    stop: tuple[str, ...] = ()
    """Stop strings. A response keeps the whole token that completes one. The engine must have been built with
    a tokenizer."""
    routes: bool = False
    """Also return the experts of every token; needs an engine that reports them
    (`config.Engine.reports_experts`)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "stop", tuple(self.stop))
        if "" in self.stop:
            raise ValueError(f"stop={list(self.stop)}: an empty string would end every response at once")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or a positive number")
        if self.top_k < -1:
            raise ValueError(f"top_k={self.top_k} must be -1 (all) or positive")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]; 1 keeps every token")

    def all_stop_tokens(self, eos: Iterable[int]) -> list[int]:
        """Sorted ids of all tokens that end a response. eos: the model's own end tokens."""
        return sorted({*self.stop_token_ids, *(() if self.ignore_eos else eos)})

    @property
    def greedy(self) -> bool:
        """Greedy decoding; log-probabilities are then those at temperature 1."""
        return self.temperature == 0


@dataclass(frozen=True)
class GenerationRequest:
    """Prompts to continue. ValueError when the lists differ in length, or when they or a prompt are empty."""

    prompts: Sequence[Tensor]
    """int64 (P_i,) each, without padding."""
    samples: Sequence[int]
    """Responses per prompt, at least 1."""
    keys: Sequence[Key]
    """Identity of each prompt, such as (seed, visit, uid). Together with the sample number (from 0) it fixes
    the random draws, so two prompts with the same key and tokens get the same responses."""

    def __post_init__(self) -> None:
        counts = len(self.prompts), len(self.samples), len(self.keys)
        if len(set(counts)) != 1:
            raise ValueError(
                f"a request has {counts[0]} prompts, {counts[1]} sample counts and {counts[2]} keys;"
                " one of each per prompt is needed"
            )
        if not self.prompts:
            raise ValueError("a request needs at least one prompt")
        for i, (prompt, n) in enumerate(zip(self.prompts, self.samples)):
            if prompt.ndim != 1 or len(prompt) == 0:
                raise ValueError(
                    f"prompt {i} has shape {tuple(prompt.shape)}; it must be a row of at least one token"
                )
            if n < 1:
                raise ValueError(f"prompt {i} asks for {n} samples; at least 1 is needed")


@dataclass(frozen=True)
class GenerationOutput:
    """B = sum of `samples` responses: all of prompt 0, then all of prompt 1, and so on. On the host."""

    responses: Tensor
    """Ragged int64 (B, R), the end token included."""
    log_probs: Tensor
    """Ragged float32 (B, R): of each sampled token, under softmax(logits / temperature), before top-k and
    top-p."""
    finish_reason: np.ndarray
    """Objects (B,): 'stop' or 'length'."""
    routed_experts: Tensor | None = None
    """Ragged (B, P + R - 1, L, K), as in `protocol/fields.py`, if they were asked for."""


@dataclass(frozen=True)
class TokenRequest:
    """One response to be sampled, or to be continued. ValueError when nothing is left to sample."""

    name: str
    """Unique among the requests in flight."""
    prompt: Tensor
    """int64 (P,)."""
    params: SamplingParams
    """`max_tokens` counts the whole response."""
    key: Key
    """As in `GenerationRequest`."""
    sample: int
    """Number of the sample, from 0."""
    sampled: tuple[int, ...] = ()
    """Tokens already sampled, by an aborted request."""

    def __post_init__(self) -> None:
        if self.prompt.ndim != 1 or len(self.prompt) == 0:
            shape = tuple(self.prompt.shape)
            raise ValueError(f"the prompt has shape {shape}; it must be a row of at least one token")
        if len(self.sampled) >= self.params.max_tokens:
            most = f"max_tokens={self.params.max_tokens}"
            raise ValueError(f"a response of {len(self.sampled)} tokens is complete: {most}")

    @property
    def context(self) -> Tensor:
        """Context of the next token, int64 (P + sampled,)."""
        if not self.sampled:
            return self.prompt
        return torch.cat([self.prompt, torch.tensor(self.sampled, dtype=torch.int64)])

    @property
    def left(self) -> SamplingParams:
        """Sampling parameters for the rest of the response."""
        return replace(self.params, max_tokens=self.params.max_tokens - len(self.sampled))


@dataclass(frozen=True)
class Completion:
    """What was sampled for a `TokenRequest`, without the tokens that had been sampled before."""

    name: str
    tokens: Tensor
    """int64 (R,), the end token included."""
    log_probs: Tensor
    """float32 (R,), as in `GenerationOutput`."""
    finish_reason: str
    """STOP, LENGTH or ABORT."""
    routed_experts: Tensor | None = None
    """(tokens, L, K) as in `GenerationOutput`, those of the prompt and of earlier tokens included."""


@dataclass(frozen=True)
class EngineSpec:
    """How the engine of one process is built; it starts without weights."""

    rollout: SamplingConfig
    device: torch.device
    dtype: torch.dtype
    generation_config: GenerationConfig | None
    """Source of the end tokens; None: the model's configuration."""
    longest_row: int
    """Maximum tokens of prompt and response together."""
    processes: int = 1
    """Processes of the run's engines on this machine."""
    tensor_parallel: int = 1
    """Tensor-parallel size: processes that share each of the engine's layers."""
    pipeline_parallel: int = 1
    """Pipeline-parallel size: stages, each with some of its layers on `tensor_parallel` processes. The
    processes of all stages are a torch.distributed group, and get the same calls."""
    rank: int = 0
    """This process's rank in that group, stage by stage."""
    section: str = "actor_rollout_ref.rollout"
    """Configuration path of `rollout`, for messages."""
    seed: int = 0
    """Seed of draws without a key (vLLM with chunked prefill on a CPU, SGLang); it differs by replica."""
    tokenizer: TokenizersBackend | None = None
    """Tokenizer for stop strings; None: stop strings are not used."""
    routes: bool = False
    """Whether requests may ask for the experts of their tokens."""
    start_seconds: float = math.inf
    """Start timeout in seconds, for engines that run in their own process."""
    adapters: AdapterLayers | None = None
    """Adapters to load besides the weights, if the engine can (`config.Engine.loads_adapters`); None: merged
    weights."""
    trust_remote_code: bool = False
    """Whether the model's own code may be run."""

    @property
    def model_parallel(self) -> int:
        """Processes that share the engine's model."""
        return self.tensor_parallel * self.pipeline_parallel


class GenerationEngine(Protocol):
    """Samples responses from a copy of the trained model, in this process or in a child process.

    Samples whole batches (`generate`) or single responses, which are submitted and finish during calls of
    `advance`. All work happens inside calls, so processes that get the same calls do the same work.
    """

    def generate(self, request: GenerationRequest, params: SamplingParams) -> GenerationOutput:
        """Samples every prompt. ValueError: a prompt that does not fit the context or the vocabulary.
        RuntimeError: without weights. FloatingPointError: log-probabilities are not numbers."""

    def submit(self, requests: Sequence[TokenRequest]) -> None:
        """Queues requests; errors as in `generate`."""

    def advance(self) -> list[Completion]:
        """Samples until at least one response is complete; [] when no request is in flight."""

    def abort(self, names: Collection[str]) -> list[Completion]:
        """Aborts requests in flight; returns the tokens sampled so far, possibly none. Weights can be updated
        once no request is in flight."""

    def update_weights(self, stream: Iterable[Weight], *, first: bool = True, last: bool = True) -> None:
        """Loads weights from (Hugging Face name, full tensor) pairs; a large tensor may come in consecutive
        parts. One update may take several calls, from the `first` to the `last`. With adapters an update may
        contain the adapters only, once the base weights are loaded. Raises ValueError naming what does not
        fit or, after the last call, what is missing."""

    def sleep(self) -> None:
        """Releases the memory of weights and caches, until the next update starts."""


@runtime_checkable
class ReadableEngine(GenerationEngine, Protocol):
    """An engine whose weights can be read back (`config.Engine.reads_back`)."""

    def held(self) -> Mapping[str, Tensor]:
        """The current weights by Hugging Face name, tied ones under each of their names; read-only."""
