"""vLLM with layers on several devices (pipeline parallelism): what one device computes."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import connection
from typing import Any

import pytest
import torch
from generation.test_native import add_noise, largest_gap, make, make_request, rows, weights
from generation.test_requests import single
from generation.test_vllm import (
    GREEDY,
    MODELS,
    NEAR,
    begin,
    cache_bytes,
    finish,
    generate,
    held,
    load,
    update,
)
from generation.test_vllm_adapters import LAYERS, drawn, merged
from generation.test_vllm_divided import Divided, assert_it_sleeps_and_leaves_nothing
from generation.vllm_process import needs_vllm
from transformers import PreTrainedModel

from hydraflow.generation.base import GenerationRequest, SamplingParams
from hydraflow.generation.native import NativeEngine
from hydraflow.generation.vllm import VllmEngine
from hydraflow.memory.generation import ServingEngineMemory
from hydraflow.memory.shape import shape_of

pytestmark = [needs_vllm, pytest.mark.slow]


def three_layers(name: str) -> Any:
    """Of two stages the first has two of them."""
    config = copy.deepcopy(MODELS[name])
    config.num_hidden_layers = 3
    if name == "tied":
        config.layer_types = ["full_attention"] * 3
    return config


SIZES = {"tied": dict(tensor=2, stages=2), "untied": dict(tensor=1, stages=3)}


@pytest.fixture(scope="module", params=SIZES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def models(name: str) -> list[PreTrainedModel]:
    """Three whose weights differ in every tensor. They are small enough that a plain forward in float32 is
    within a few 1e-6 of one in float64."""
    made = [make(three_layers(name)) for _ in range(3)]
    for i, model in enumerate(made):
        for parameter in model.parameters():
            parameter.data.mul_(0.7)
        add_noise(model, i, 0.05)
    return made


@pytest.fixture(scope="module")
def engine(name: str) -> Iterator[Divided]:
    engine = Divided(three_layers(name), max_num_seqs=16, max_num_batched_tokens=256, **SIZES[name])
    yield engine
    engine.stop()


def most_batches(engine: VllmEngine, request: GenerationRequest) -> int:
    """The largest number of batches between the first stage and the last."""
    core = engine._engine.engine_core.engine_core
    execute, most = core.model_executor.execute_model, 0

    def counted(scheduled: Any, non_block: bool) -> Any:
        nonlocal most
        sampled = [scheduled, *(one for _, one, _ in core.batch_queue)]
        most = max(most, sum(one.total_num_scheduled_tokens > 0 for one in sampled))
        return execute(scheduled, non_block)

    core.model_executor.execute_model = counted
    engine.generate(request, GREEDY)
    core.model_executor.execute_model = execute
    return most


def test_after_every_update_weights_samples_and_log_probs_are_those_of_one_device(
    engine: Divided, models: list[PreTrainedModel]
) -> None:
    long, request = make_request([100, 130, 1, 2, 3]), make_request([1, 3, 9, 17, 40], samples=3)
    for model, max_bytes in zip(models, (1000, 10**6, 50_000), strict=True):
        load(engine, model, max_bytes)
        for found in engine.run(held):
            assert all(torch.equal(found[name], tensor) for name, tensor in weights(model).items())
        expected = rows(NativeEngine(model).generate(long, GREEDY))
        assert all(rows(output) == expected for output in engine.run(generate, long, GREEDY))
        for temperature in (1.0, 0.7):
            params = SamplingParams(max_tokens=16, temperature=temperature, top_p=0.9)
            first, *others = engine.run(generate, request, params)
            assert all(rows(other) == rows(first) for other in others), "the last stage draws for all"
            assert largest_gap(model, request, first, temperature) < NEAR


def test_every_stage_computes_a_batch_of_its_own(
    name: str, engine: Divided, models: list[PreTrainedModel]
) -> None:
    load(engine, models[0])
    found = engine.run(most_batches, make_request([100] * 6))  # two prompts are a batch
    assert found == [SIZES[name]["stages"]] * len(engine.processes)


def test_an_aborted_response_is_continued_with_new_weights(
    engine: Divided, models: list[PreTrainedModel]
) -> None:
    """A batch of the aborted requests is still between the stages."""
    load(engine, models[0])
    params = replace(GREEDY, ignore_eos=True)
    wanted = single(make_request([3, 9, 17, 40]), params)
    short = replace(wanted[0], name="short", params=replace(params, max_tokens=5))
    [(complete, aborted), *others] = engine.run(begin, [short, *wanted])
    assert [(one.name, len(one.tokens)) for one in complete] == [("short", 5)] and len(aborted) == 4
    sampled = {one.name: tuple(one.tokens.tolist()) for one in aborted}
    assert all({one.name: tuple(one.tokens.tolist()) for one in also} == sampled for _, also in others)
    load(engine, models[1])
    left = [replace(one, sampled=sampled[one.name]) for one in wanted]
    expected = finish(NativeEngine(models[1]), left)  # type: ignore[arg-type]
    for found in engine.run(finish, left):
        assert {name: one.tokens.tolist() for name, one in found.items()} == {
            name: one.tokens.tolist() for name, one in expected.items()
        }


def test_the_cache_of_the_fullest_stage_is_what_the_plan_estimates(name: str, engine: Divided) -> None:
    tensor, stages = (SIZES[name].get(kind, 1) for kind in ("tensor", "stages"))
    shape = shape_of(three_layers(name).to_dict())
    planned = ServingEngineMemory(shape, 4, tensor, stages, share=0.5, device_bytes=None, shared=True)
    assert max(engine.run(cache_bytes)) == planned.sample_on_cpu(16, 256, None).kv_cache


def change_embedding(engine: VllmEngine) -> None:
    model = engine._engine.model_executor.driver_worker.worker.model_runner.get_model()
    model.get_parameter("model.embed_tokens.weight").data.add_(1)


@pytest.mark.parametrize("name", ["tied"], indirect=True)
def test_stages_with_different_copies_of_an_embedding_are_found(
    engine: Divided, models: list[PreTrainedModel]
) -> None:
    load(engine, models[0])
    for process in engine.processes[-2:]:  # the last stage
        process.run(change_embedding)
    for process in engine.processes:
        process.ask(held)
    for process in engine.processes:
        with pytest.raises(ValueError, match="^stages 0 and 1 hold different numbers for model.embed_tokens"):
            process.answer()


def test_it_sleeps_and_leaves_nothing(engine: Divided, models: list[PreTrainedModel]) -> None:
    assert_it_sleeps_and_leaves_nothing(engine, models[1], models[2])


def test_a_stage_that_is_killed_fails_the_others(engine: Divided, models: list[PreTrainedModel]) -> None:
    """Those that wait for it, and when the trainer ends them, those that wait for these. The last test of
    this engine."""
    load(engine, models[0])
    request = make_request([5] * 16, samples=20)
    for process in engine.processes:
        process.ask(generate, request, replace(GREEDY, max_tokens=200, ignore_eos=True))
    *others, last = engine.processes
    time.sleep(0.5)
    last.process.kill()
    while others:
        answers = connection.wait([process.pipe for process in others], timeout=20)
        assert answers, f"{len(others)} processes wait for one that is gone"
        for process in [process for process in others if process.pipe in answers]:
            with pytest.raises(RuntimeError, match="(?i)closed by peer|reset by peer"):
                process.answer()
            process.process.kill()
            others.remove(process)


def test_every_stage_computes_with_its_adapters() -> None:
    """The second update brings them alone."""
    base = make(three_layers("tied"))
    engine = Divided(base.config, stages=2, max_num_seqs=16, adapters=LAYERS)
    request, plain = make_request([1, 9, 40]), dict(weights(base))
    for adapter, sent in ((drawn(base, 0), plain), (drawn(base, 1), {})):
        engine.run(update, [[*(sent | adapter).items()]])
        model = merged(base, adapter)
        expected = rows(NativeEngine(model).generate(request, GREEDY))
        assert [rows(output) for output in engine.run(generate, request, GREEDY)] == [expected] * 2
        params = SamplingParams(max_tokens=16, temperature=0.7)
        assert largest_gap(model, request, engine.run(generate, request, params)[0], 0.7) < NEAR
        for found in engine.run(held):
            assert all(torch.equal(found[name], tensor) for name, tensor in (plain | adapter).items())
    engine.stop()
