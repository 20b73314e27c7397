"""Single responses that are submitted, advanced, aborted and continued, on the native engine: the same bits
as in a whole batch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from generation.test_native import CONFIGS, make, make_request, rows, weights

from hydraflow.generation.base import ABORT, Completion, GenerationRequest, SamplingParams, TokenRequest
from hydraflow.generation.native import NativeEngine
from hydraflow.protocol import ragged

LENGTHS = [3, 8, 5, 6, 8, 17, 1]


@pytest.fixture(scope="module")
def engine() -> NativeEngine:
    return NativeEngine(make(CONFIGS["qwen3 tied"]), max_num_seqs=5)


def single(request: GenerationRequest, params: SamplingParams) -> list[TokenRequest]:
    """Its responses one by one, in the order of its rows."""
    return [
        TokenRequest(f"{i}-{sample}", prompt, params, key, sample)
        for i, (prompt, samples, key) in enumerate(zip(request.prompts, request.samples, request.keys))
        for sample in range(samples)
    ]


def drained(engine: NativeEngine) -> dict[str, Completion]:
    found: dict[str, Completion] = {}
    while some := engine.advance():
        assert not found.keys() & {one.name for one in some}
        found |= {one.name: one for one in some}
    return found


def test_requests_in_any_order_are_sampled_as_in_a_batch(engine: NativeEngine) -> None:
    request, params = make_request(LENGTHS, samples=3), SamplingParams(max_tokens=12, temperature=0.7)
    wanted, whole = single(request, params), engine.generate(request, params)
    shuffled = wanted.copy()
    random.Random(1).shuffle(shuffled)
    engine.submit(shuffled[:9])
    found = {one.name: one for one in engine.advance()}
    engine.submit(shuffled[9:])
    found |= drained(engine)
    assert [found[one.name].tokens.tolist() for one in wanted] == rows(whole)
    expected = ragged.rows(whole.log_probs)
    assert all(torch.equal(found[one.name].log_probs, row) for one, row in zip(wanted, expected))
    assert [found[one.name].finish_reason for one in wanted] == list(whole.finish_reason)


def test_an_engine_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_seqs=0 must be at least 1"):
        NativeEngine(make(CONFIGS["qwen3 tied"]), max_num_seqs=0)


def test_requests_that_share_a_prompt_or_a_key_are_told_apart(engine: NativeEngine) -> None:
    one, other = torch.tensor([3, 7, 5]), torch.tensor([9, 2, 4])
    request = GenerationRequest([one, one, other], [1, 1, 1], [(0, "a"), (0, "b"), (0, "b")])
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    whole = rows(engine.generate(request, params))
    engine.submit(single(request, params))
    assert [found.tokens.tolist() for found in drained(engine).values()] == whole
    assert len(set(map(tuple, whole))) == 3


def test_a_call_finishes_as_many_as_fit_into_one_batch(engine: NativeEngine) -> None:
    """The others can still be aborted between two calls; those that came first are first."""
    wanted = single(make_request([3] * 7, samples=2), SamplingParams(max_tokens=2))
    engine.submit(wanted)
    names = [one.name for one in wanted]
    assert [one.name for one in engine.advance()] == names[:5]
    assert [one.name for one in engine.abort(names[8:])] == names[8:]
    assert [one.name for one in engine.advance()] == names[5:8] and engine.advance() == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_continued_response_is_the_unbroken_one(engine: NativeEngine, temperature: float) -> None:
    request, params = make_request(LENGTHS), SamplingParams(max_tokens=12, temperature=temperature)
    whole = rows(engine.generate(request, params))
    wanted = [
        TokenRequest(one.name, one.prompt, params, one.key, one.sample, tuple(row[: i % 4]))
        for i, (one, row) in enumerate(zip(single(request, params), whole))
        if len(row) > i % 4
    ]
    engine.submit(wanted)
    found = drained(engine)
    assert len(wanted) > 4
    for one in wanted:
        assert [*one.sampled, *found[one.name].tokens.tolist()] == whole[int(one.name.split("-")[0])]


def test_aborted_requests_are_gone_and_weights_may_change(engine: NativeEngine) -> None:
    request, params = make_request(LENGTHS), SamplingParams(max_tokens=6, temperature=0)
    wanted = single(request, params)
    engine.submit(wanted)
    ended = engine.abort([one.name for one in wanted[2:]] + ["of nobody"])
    assert [(one.name, len(one.tokens), one.finish_reason) for one in ended] == [
        (one.name, 0, ABORT) for one in wanted[2:]
    ]
    first = weights(make(CONFIGS["qwen3 tied"]))
    engine.update_weights((name, tensor * 1.5) for name, tensor in first.items())
    found = drained(engine)
    assert [found[one.name].tokens.tolist() for one in wanted[:2]] == rows(engine.generate(request, params))[
        :2
    ]
    engine.update_weights(first.items())


def test_what_cannot_be_sampled_is_refused_at_once(engine: NativeEngine) -> None:
    params, prompt = SamplingParams(max_tokens=3), torch.tensor([5, 9])
    with pytest.raises(ValueError, match="a response of 3 tokens is complete: max_tokens=3"):
        TokenRequest("a", prompt, params, (1,), 0, (4, 5, 6))
    with pytest.raises(ValueError, match="the vocabulary has 23 tokens"):
        engine.submit(
            [TokenRequest("a", prompt, params, (1,), 0), TokenRequest("b", prompt + 20, params, (1,), 0)]
        )
    assert engine.advance() == []


def test_the_request_that_cannot_be_sampled_is_named(engine: NativeEngine) -> None:
    params = SamplingParams(max_tokens=2)
    good = TokenRequest("good", torch.tensor([3]), params, (1,), 0)
    bad = TokenRequest("bad", torch.tensor([10**6]), params, (1,), 0)
    with pytest.raises(ValueError, match="request bad: prompt 0 holds token 1000000"):
        engine.submit([good, bad])
    with pytest.raises(
        ValueError, match=r"the prompt has shape \(0,\); it must be a row of at least one token"
    ):
        TokenRequest("empty", torch.empty(0, dtype=torch.int64), params, (1,), 0)
    with pytest.raises(ValueError, match="experts"):
        engine.submit([TokenRequest("routes", torch.tensor([3]), replace(params, routes=True), (1,), 0)])
    assert engine.advance() == []
