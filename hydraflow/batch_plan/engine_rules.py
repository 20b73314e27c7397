"""Rules for the limits of a generation engine.

In: a section `rollout` and the longest row. Out: broken rules, for training and for generation alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from hydraflow.batch_plan.repair import BUDGET, Fix, Violation
from hydraflow.generation.config import GENERATION_ENGINES, SamplingConfig, least_batched_tokens


def engine_violations(
    rollout: SamplingConfig, section: str, *, longest_prompt: int, longest_response: int, device_type: str
) -> Iterator[Violation]:
    """Serving engines refuse rows above max_model_len, and vLLM budgets below its sequences or an unchunked
    prompt. `section`: where the configuration has `rollout`."""
    engine = GENERATION_ENGINES.get(rollout.name)
    if engine is None or "max_model_len" not in engine.reads:
        return
    row = longest_prompt + longest_response
    longest, key = rollout.max_model_len, f"{section}.max_model_len"
    if longest is not None and longest < row:
        fitting: list[Fix] = [{key: None}, {key: row}]
        text = f"must hold the longest row, {longest_prompt} + {longest_response} = {row} tokens"
        yield Violation("max_model_len", BUDGET, key, longest, text, fitting)
    if "max_num_batched_tokens" not in engine.reads:
        return
    key = f"{section}.max_num_batched_tokens"
    tokens, most = rollout.max_num_batched_tokens, rollout.max_num_seqs
    least = least_batched_tokens(rollout, row, device_type)
    if tokens is None or tokens >= least:
        return
    because = "vLLM decodes one token of each sequence at a time"
    text = f"must be at least {section}.max_num_seqs={most}: {because}"
    if tokens >= most:
        chunked = f"{section}.enable_chunked_prefill"
        default = f"{chunked}=null on a CPU"
        because = default if rollout.enable_chunked_prefill is None else f"{chunked}=false"
        text = f"must hold a whole row of {longest or row} tokens, because {because}"
    yield Violation("max_num_batched_tokens", BUDGET, key, tokens, text, [{key: least}])
