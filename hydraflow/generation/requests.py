"""Shared by engines that take single requests: whole batches, aborted requests, seeds, and input checks.

In: a batch of prompts, or a request's key. Out: the batch's rows in order, or a seed. Left out on purpose:
the native engine's own sampling of batches and random numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hydraflow.errors import EnvironmentFault
from hydraflow.generation.base import (
    ABORT,
    Completion,
    GenerationEngine,
    GenerationOutput,
    GenerationRequest,
    Key,
    SamplingParams,
    TokenRequest,
)
from hydraflow.models.loading import Context
from hydraflow.protocol import ragged

if TYPE_CHECKING:
    from transformers import TokenizersBackend


def sample_batch(
    engine: GenerationEngine, request: GenerationRequest, params: SamplingParams
) -> GenerationOutput:
    """Samples all responses with `submit` and `advance`. No request is in flight afterwards, even on
    errors."""
    requests = [
        TokenRequest(f"{i}-{sample}", prompt, params, key, sample)
        for i, (prompt, samples, key) in enumerate(zip(request.prompts, request.samples, request.keys))
        for sample in range(samples)
    ]
    names = [one.name for one in requests]
    found: dict[str, Completion] = {}
    try:
        engine.submit(requests)
        while some := engine.advance():
            found |= {one.name: one for one in some}
    except BaseException:
        with suppress(RuntimeError, ArithmeticError, EnvironmentFault):  # the first error is the one to raise
            engine.abort(names)
        raise
    return output_of([found[name] for name in names])


def output_of(ordered: Sequence[Completion]) -> GenerationOutput:
    """Responses as a batch, in this order."""
    routes = [one.routed_experts for one in ordered if one.routed_experts is not None]
    return GenerationOutput(
        ragged.from_rows([one.tokens for one in ordered]),
        ragged.from_rows([one.log_probs for one in ordered]),
        np.array([one.finish_reason for one in ordered], dtype=object),
        ragged.from_rows(routes) if routes else None,
    )


def aborted(name: str) -> Completion:
    """The completion of a request that was aborted before it had a token."""
    none = torch.empty(0, dtype=torch.int64)
    return Completion(name, none, none.float(), ABORT)


def finite(log_probs: Sequence[float]) -> Tensor:
    """Log-probabilities of sampled tokens, float32 (R,). FloatingPointError when one is not a number."""
    found = torch.tensor(log_probs, dtype=torch.float32)
    if not bool(found.isfinite().all()):
        raise FloatingPointError("log-probabilities of sampled tokens are not finite: the weights are broken")
    return found


@dataclass(frozen=True)
class Limits:
    """What an engine can sample from."""

    context: Context | None
    vocabulary: int
    tokenizer: TokenizersBackend | None
    """For stop strings."""

    def require_all(self, requests: Sequence[TokenRequest]) -> None:
        """ValueError as of `require`, with the name of the first request that it is about."""
        for one in requests:
            try:
                self.require([one.prompt], one.params)
            except ValueError as error:
                raise ValueError(f"request {one.name}: {error}") from None

    def require(self, prompts: Sequence[Tensor], params: SamplingParams) -> None:
        """ValueError: a prompt that is too long for the engine, or with a token that the model does not know;
        or stop strings without a tokenizer."""
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop={list(params.stop)} needs an engine that was built with a tokenizer")
        for i, prompt in enumerate(prompts):
            row = len(prompt) + params.max_tokens
            if self.context is not None and row > self.context.tokens:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens; with max_tokens={params.max_tokens} that is {row},"
                    f" more than {self.context.limit}"
                )
            low, high = (int(x) for x in prompt.aminmax())
            if low < 0 or high >= self.vocabulary:
                raise ValueError(
                    f"prompt {i} holds token {high if high >= self.vocabulary else low}; the vocabulary has"
                    f" {self.vocabulary} tokens"
                )


def engine_context(tokens: int) -> Context:
    """The context of an engine that has its own limit."""
    return Context(tokens, f"rollout.max_model_len={tokens}")


def seed_of(key: Key, sample: int, sampled: int = 0) -> int:
    """The seed of one sample's draws: 63 bits of a hash, of which torch's generator on a CPU uses 32.
    `sampled`: tokens of the response that exist already."""
    parts = [part if isinstance(part, str) else int(part) for part in key]
    words = [*parts, sample, *([sampled] if sampled else [])]
    digest = hashlib.blake2b(json.dumps(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
