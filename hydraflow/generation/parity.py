"""Compares, when the built-in engine gets its first weights, its log-probabilities with those of the model's
own forward pass without a cache.

In: an engine and its model. Out: nothing, or a ConfigError. Models may keep more state between tokens than
keys and values: recurrent states, index keys. If such state is stored in an unknown way, or in the model
itself, the reported log-probabilities are not those of the distribution that is sampled from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hydraflow.device import ran_out_of_memory
from hydraflow.errors import ConfigError, first_line
from hydraflow.generation.base import GenerationEngine, GenerationRequest, SamplingParams
from hydraflow.models.loading import context_of
from hydraflow.models.probe import (
    REFUSED,
    ROWS,
    deviation,
    is_exact,
    is_rounding,
    own_log_probs,
    probe_rows,
    within_tolerance,
)
from hydraflow.protocol import ragged

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS, SAMPLES = 6, 2
"""Tokens per response; samples per prompt."""
OTHER_WITH_A_CACHE = ("moshi", "zamba2")
"""Model types whose own code gives different numbers with a cache, but in so few rows that this comparison
could miss them."""


def require_parity(engine: GenerationEngine, model: PreTrainedModel, field: str) -> None:
    """ConfigError if the engine's log-probabilities differ from the model's. field: the engine's
    configuration key."""
    context = context_of(model.config)
    if context is not None and context.tokens < TOKENS + max(prompt for prompt, _ in ROWS):
        return
    try:
        off, right = _compared(engine, model)
        why = f"its log-probabilities are off by {off:.2g} from those of the model's own forward pass"
    except FloatingPointError:
        return  # damaged weights; sampling itself reports them
    except REFUSED as error:
        if ran_out_of_memory(error):
            raise
        right, why = False, f"the model's code raises {type(error).__name__}: {first_line(error)}"
    if right and model.config.model_type in OTHER_WITH_A_CACHE:
        right, why = False, "its code gives different numbers with a cache than without"
    if not right:
        raise not_sampled(model.config.model_type, field, why)


def not_sampled(model_type: str, field: str, why: str) -> ConfigError:
    """The error for a model type that the engine cannot sample from."""
    rule = f"the built-in engine cannot sample from models of type {model_type}: {why}"
    return ConfigError.one(field, "native", rule, f"{field}=vllm, or another model")


@torch.inference_mode()
def _compared(engine: GenerationEngine, model: PreTrainedModel) -> tuple[float, bool]:
    """How far log-probabilities are off, and whether that is rounding. Generates twice, unless the first
    call is already wrong: state that the model keeps shows only in the second."""
    embeddings: Any = model.get_input_embeddings()
    prompts = ragged.rows(probe_rows(embeddings.num_embeddings)[0])
    request = GenerationRequest(
        prompts, [SAMPLES] * len(prompts), [("probe", i) for i in range(len(prompts))]
    )
    off, right = _compared_once(engine, model, request)
    return _compared_once(engine, model, request) if right else (off, right)


def _compared_once(
    engine: GenerationEngine, model: PreTrainedModel, request: GenerationRequest
) -> tuple[float, bool]:
    output = engine.generate(request, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    responses = ragged.rows(output.responses)

    def published() -> torch.Tensor:
        prompts = [prompt for prompt in request.prompts for _ in range(SAMPLES)]
        pairs = zip(prompts, responses, strict=True)
        return torch.cat([own_log_probs(model, *pair, model.device) for pair in pairs]).cpu()

    ours, theirs = ragged.parts(output.log_probs)[0], published()
    exact = is_exact(model, model.dtype)
    worst, middle = deviation(ours, theirs, ragged.lengths(output.responses), exact=exact)
    if (right := within_tolerance(worst, middle, model.dtype)) is None:
        right = is_rounding(ours, theirs, model.config, published)
    return worst, right
