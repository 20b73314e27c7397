"""Mixtures of experts in vLLM: their weights after every update, their probabilities, and the experts that
it tells of each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from generation.test_native import (
    SMALL,
    expected_log_probs,
    largest_gap,
    make,
    make_request,
    rows,
    weights,
)
from generation.test_native_routes import chosen_by
from generation.test_requests import single
from generation.test_vllm import (
    GREEDY,
    MORE_THAN_A_BLOCK,
    NEAR,
    assert_refused,
    begin,
    finish,
    generate,
    held,
    load,
    sleep,
)
from generation.test_vllm_divided import Divided
from generation.vllm_process import EngineProcess, needs_vllm
from transformers import (
    GptOssConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hydraflow.generation.base import SamplingParams
from hydraflow.generation.config import EngineKwargs
from hydraflow.generation.native import NativeEngine
from hydraflow.protocol import ragged

pytestmark = [needs_vllm, pytest.mark.slow]

SIZES = {**SMALL, "head_dim": 32, "max_position_embeddings": 256}
CHOSEN = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24)
"""Sizes that vLLM's own kernel on a CPU would not take."""


def with_shared_experts(**others: Any) -> Any:
    sizes = SIZES | dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
    return Qwen2MoeConfig(**sizes | others, **CHOSEN, shared_expert_intermediate_size=40)


MIXTURES: dict[str, Any] = {
    "a dense layer": Qwen3MoeConfig(**SIZES, **CHOSEN, mlp_only_layers=[0]),
    "shared experts": with_shared_experts(),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}
ROUTED = replace(GREEDY, ignore_eos=True, routes=True)


@pytest.fixture(scope="module", params=MIXTURES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def process(name: str) -> Iterator[EngineProcess]:
    engine = EngineProcess(MIXTURES[name], routes=True, max_num_seqs=8, enable_prefix_caching=True)
    yield engine
    engine.stop()


def models(config: Any, count: int) -> list[PreTrainedModel]:
    """Whose weights differ in every tensor. Small changes: with large weights a rounding error chooses other
    experts."""
    made = [make(config) for _ in range(count)]
    for i, model in enumerate(made):
        draw = torch.Generator().manual_seed(i)
        for parameter in model.parameters():
            parameter.data.mul_(0.5).add_(torch.randn(parameter.shape, generator=draw) * 0.05)
    return made


def test_three_updates_in_a_row(process: EngineProcess, name: str) -> None:
    """The second after a sleep. In parts of a tensor, and all at once."""
    request = make_request([3, 9, 17], samples=2)
    sampled = SamplingParams(max_tokens=16, temperature=0.7, ignore_eos=True)
    for model, max_bytes in zip(models(MIXTURES[name], 3), (3000, 10**6, 3000), strict=True):
        load(process, model, max_bytes)
        found = process.run(held)
        assert all(torch.equal(found[one], tensor) for one, tensor in weights(model).items())
        output = process.run(generate, request, GREEDY)
        assert rows(output) == rows(NativeEngine(model).generate(request, GREEDY))
        assert largest_gap(model, request, process.run(generate, request, sampled), 0.7) < NEAR
        if max_bytes == 3000:
            process.run(sleep)


def test_the_experts_of_every_token(process: EngineProcess, name: str) -> None:
    """Also of prompts that are in the cache, of rows that wait for others, and after an update."""
    prompts = make_request([1, 9, MORE_THAN_A_BLOCK, MORE_THAN_A_BLOCK + 1], samples=5)
    prompts = replace(prompts, samples=[2, 3, 3, 3])
    for model in models(MIXTURES[name], 2):
        load(process, model)
        for params in (ROUTED, replace(ROUTED, temperature=1.0, stop_token_ids=tuple(range(2, 12)))):
            output = process.run(generate, prompts, params)
            assert output.routed_experts is not None and output.routed_experts.dtype == torch.uint8
            owner = [prompt for prompt, n in zip(prompts.prompts, prompts.samples) for _ in range(n)]
            found = zip(owner, rows(output), ragged.rows(output.routed_experts), strict=True)
            for prompt, row, routes in found:
                ids = torch.cat([prompt, torch.tensor(row)])[:-1]
                assert torch.equal(routes.long().sort(-1).values, chosen_by(model, ids).sort(-1).values)
    assert process.run(generate, prompts, GREEDY).routed_experts is None


def test_the_experts_of_a_response_that_was_interrupted(process: EngineProcess, name: str) -> None:
    old, new = models(MIXTURES[name], 2)
    load(process, old)
    wanted = single(make_request([3, 17]), ROUTED)
    short = replace(wanted[0], name="short", params=replace(ROUTED, max_tokens=5))
    (complete,), aborted = process.run(begin, [short, *wanted])
    assert complete.routed_experts is not None and len(complete.routed_experts) == 3 + 5 - 1
    load(process, new)
    so_far = {one.name: tuple(one.tokens.tolist()) for one in aborted}
    left = [replace(one, sampled=so_far[one.name]) for one in wanted]
    found = process.run(finish, left)
    for one in left:
        ids = torch.cat([one.context, found[one.name].tokens])[:-1]
        routes = found[one.name].routed_experts
        assert torch.equal(routes.long().sort(-1).values, chosen_by(new, ids).sort(-1).values)
        log_probs = expected_log_probs(new, one.context, found[one.name].tokens, 1.0)
        assert float((found[one.name].log_probs - log_probs).abs().max()) < NEAR


DIVIDED = {
    "slices of experts": (MIXTURES["a dense layer"], dict(tensor=2)),
    "experts": (
        MIXTURES["a dense layer"],
        dict(tensor=2, engine_kwargs=EngineKwargs({"enable_expert_parallel": True})),
    ),
    "layers": (with_shared_experts(num_hidden_layers=4, mlp_only_layers=[0, 2]), dict(stages=2)),
}


@pytest.mark.parametrize("what", DIVIDED)
def test_divided_among_two_devices(what: str) -> None:
    config, given = DIVIDED[what]
    engine = Divided(config, routes=True, max_num_seqs=8, **given)
    request = make_request([1, 9, 17], samples=2)
    for model in models(config, 2):
        load(engine, model, 3000)
        for found in engine.run(held):
            assert all(torch.equal(found[name], tensor) for name, tensor in weights(model).items())
        for output in engine.run(generate, request, ROUTED):
            assert rows(output) == rows(NativeEngine(model).generate(request, ROUTED))
            assert largest_gap(model, request, output, 1.0) < NEAR
            assert output.routed_experts is not None
            for i, routes in enumerate(ragged.rows(output.routed_experts)):
                ids = torch.cat([request.prompts[i // 2], torch.tensor(rows(output)[i])])[:-1]
                assert torch.equal(routes.long().sort(-1).values, chosen_by(model, ids).sort(-1).values)
    engine.stop()


def test_what_it_cannot_record_is_refused() -> None:
    dense = EngineProcess(Qwen3Config(**SIZES), routes=True)
    assert_refused(dense, "Qwen3ForCausalLM has no experts that can be recorded")
    silent = EngineProcess(MIXTURES["mixtral"])
    with pytest.raises(ValueError, match="built to record them"):
        load(silent, make(MIXTURES["mixtral"]))
        silent.run(generate, make_request([3]), ROUTED)
    silent.stop()
    other = EngineProcess(GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))
    assert_refused(other, "No Unquantized MoE backend supports(?s:.*)name=native")
