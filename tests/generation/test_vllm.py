"""vLLM against plain forwards and the native engine: the same tokens, log-probabilities in the trainer's
convention, and after every update nothing of the old weights."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from generation.test_native import (
    CONFIGS,
    END,
    SMALL,
    VOCABULARY,
    Sample,
    add_noise,
    assert_samples_follow_the_distribution,
    expected_log_probs,
    in_buckets,
    largest_gap,
    make,
    make_request,
    rows,
    weights,
)
from generation.test_requests import drained, single
from generation.test_stopping import STOPS, letters, needed
from generation.vllm_process import EngineProcess, needs_vllm
from torch import Tensor
from transformers import DeepseekV3Config, Olmo2Config, PreTrainedModel

from hydraflow.generation.base import (
    ABORT,
    Completion,
    GenerationEngine,
    GenerationOutput,
    GenerationRequest,
    SamplingParams,
    TokenRequest,
)
from hydraflow.generation.config import EngineKwargs
from hydraflow.generation.native import NativeEngine
from hydraflow.generation.vllm import VllmEngine
from hydraflow.memory.generation import CPU_BLOCK, ServingEngineMemory
from hydraflow.memory.shape import shape_of
from hydraflow.weights.buckets import Weight, checksum_of

pytestmark = [needs_vllm, pytest.mark.slow]

GREEDY = SamplingParams(max_tokens=20, temperature=0)
NEAR = 1e-5
MORE_THAN_A_BLOCK = CPU_BLOCK + 30
"""Only whole blocks of vLLM's cache are kept for later requests."""


def config_of(name: str) -> Any:
    config = copy.deepcopy(CONFIGS[name])
    config.head_dim, config.max_position_embeddings = 32, 256  # vLLM has no kernels for smaller heads
    return config


MODELS = {"tied": config_of("qwen3 tied"), "untied": config_of("llama")}
MODELS["untied"].sliding_window, MODELS["untied"].logit_scale = 6, 0.5  # which this type ignores


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def process(name: str) -> Iterator[EngineProcess]:
    engine = EngineProcess(MODELS[name], max_num_seqs=64)
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def models(name: str) -> list[PreTrainedModel]:
    """Three whose weights differ in every tensor."""
    made = [make(MODELS[name]) for _ in range(3)]
    for seed, model in enumerate(made):
        add_noise(model, seed)
    return made


@pytest.fixture
def engine(process: EngineProcess, models: list[PreTrainedModel]) -> EngineProcess:
    """With the first model's weights."""
    load(process, models[0])
    return process


# What the process runs; it imports this file.


def generate(engine: VllmEngine, request: GenerationRequest, params: SamplingParams) -> GenerationOutput:
    return engine.generate(request, params)


def update(engine: GenerationEngine, parts: list[list[Weight]]) -> None:
    for number, part in enumerate(parts):
        engine.update_weights(iter(part), first=number == 0, last=number == len(parts) - 1)


def update_borrowed(engine: GenerationEngine, stream: dict[str, Tensor]) -> None:
    """Every tensor comes in the same memory, and is gone when the next one is asked for."""
    buffer = torch.empty(max(tensor.numel() for tensor in stream.values()))

    def borrowed() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream.items():
            view = buffer[: tensor.numel()].view(tensor.shape)
            yield name, view.copy_(tensor)
            buffer.fill_(7.0)

    engine.update_weights(borrowed())


def held(engine: VllmEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.held().items()}


def sleep(engine: VllmEngine) -> tuple[int, int]:
    """Bytes that it needs, before and after; its cache's are written to."""
    for weight in engine.held().values():
        checksum_of(weight)  # as after a transfer; numpy then shares the weights' memory
    before = psutil.Process().memory_info().rss
    engine.sleep()
    return before, psutil.Process().memory_info().rss


def cache_bytes(engine: VllmEngine) -> int:
    caches = engine._engine.model_executor.driver_worker.worker.model_runner.kv_caches
    storages = [cache.untyped_storage() for cache in caches]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def packed(engine: VllmEngine) -> set[bool]:
    """Whether linear layers compute with packed copies of their weights, whatever weights they are given."""
    model = engine._engine.model_executor.driver_worker.worker.model_runner.get_model()
    found = set()
    for layer in model.modules():
        if hasattr(layer, "cpu_linear") and hasattr(layer, "input_size_per_partition"):
            width, height = layer.input_size_per_partition, layer.output_size_per_partition
            product = layer.cpu_linear(torch.ones(1, width), torch.zeros(height, width), None)
            found.add(bool(product.any()))
    return found


def listening(engine: VllmEngine) -> set[str]:
    """Addresses at which the process can be reached."""
    return {one.laddr.ip for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN}


def fail_while_it_samples(engine: VllmEngine, request: GenerationRequest, params: SamplingParams) -> str:
    step, engine._engine.step = engine._engine.step, lambda: 1 / 0
    try:
        engine.generate(request, params)
    except ZeroDivisionError:
        return "failed"
    finally:
        engine._engine.step = step
    return "did not fail"


def begin(engine: VllmEngine, requests: list[TokenRequest]) -> tuple[list[Completion], list[Completion]]:
    """What is complete after one advance, and what the others have."""
    engine.submit(requests)
    complete = engine.advance()
    ended = {one.name for one in complete}
    return complete, engine.abort([one.name for one in requests if one.name not in ended])


def abort_at_once(engine: VllmEngine, requests: list[TokenRequest]) -> list[Completion]:
    engine.submit(requests)
    return engine.abort([one.name for one in requests])


def finish(engine: VllmEngine, requests: list[TokenRequest]) -> dict[str, Completion]:
    engine.submit(requests)
    return drained(engine)


def load(process: Any, model: PreTrainedModel, max_bytes: int = 10**6) -> None:
    """process: one engine, or all that share a model."""
    process.run(update, in_buckets(model, max_bytes))


# What is asked of each engine of a server; the tests of SGLang import these.


def assert_native(
    sample: Sample, model: PreTrainedModel, request: GenerationRequest, params: SamplingParams
) -> None:
    output = sample(request, params)
    expected = NativeEngine(model, tokenizer=letters()).generate(request, params)
    assert rows(output) == rows(expected)
    assert list(output.finish_reason) == list(expected.finish_reason)
    assert largest_gap(model, request, output, 1.0) < NEAR


def assert_stops_at_strings(sample: Sample, model: PreTrainedModel, most: int) -> list[list[int]]:
    """In responses of at most so many tokens. Returns those that are sampled without stop strings."""
    params = SamplingParams(most, temperature=0, stop=STOPS)
    assert_native(sample, model, request := make_request([*range(1, 25)]), params)
    sampled = replace(params, temperature=1.0, ignore_eos=True)
    free = rows(sample(request, replace(sampled, stop=())))
    stopped = sample(request, sampled)
    assert rows(stopped) == [row[: needed(row)] for row in free]
    assert list(stopped.finish_reason) == ["stop" if needed(row) else "length" for row in free]
    assert largest_gap(model, request, stopped, 1.0) < NEAR
    return free


def assert_ends_with_end_tokens(sample: Sample, model: PreTrainedModel, request: GenerationRequest) -> None:
    output = sample(request, SamplingParams(max_tokens=15))
    assert set(output.finish_reason) == {"stop", "length"}, "both occur"
    for row, reason in zip(rows(output), output.finish_reason):
        assert END not in row[:-1] and (row[-1] == END) == (reason == "stop")
    free = sample(request, SamplingParams(max_tokens=15, ignore_eos=True, top_k=0))
    assert [f[: len(s)] for f, s in zip(rows(free), rows(output))] == rows(output)
    stops = SamplingParams(max_tokens=15, temperature=0, stop_token_ids=(7, 8), ignore_eos=True)
    assert rows(sample(request, stops)) == rows(NativeEngine(model).generate(request, stops))


def assert_trainers_log_probs(
    sample: Sample, model: PreTrainedModel, request: GenerationRequest, params: SamplingParams
) -> None:
    output = sample(request, params)
    assert largest_gap(model, request, output, params.temperature) < NEAR
    if params.temperature != 1:
        assert largest_gap(model, request, output, 1.0) > 0.01, "the temperature makes a difference"


def test_greedy_is_native_token_for_token(engine: EngineProcess, models: list[PreTrainedModel]) -> None:
    assert_native(partial(engine.run, generate), models[0], make_request([1, 3, 9, 17, 40]), GREEDY)


def test_stop_strings_are_natives(engine: EngineProcess, models: list[PreTrainedModel]) -> None:
    free = assert_stops_at_strings(partial(engine.run, generate), models[0], 20)
    assert 5 < len([row for row in free if (needed(row) or 20) < 20]) < 24


def test_a_stop_string_may_have_begun_before_an_interruption(
    engine: EngineProcess, models: list[PreTrainedModel]
) -> None:
    request, params = make_request([*range(1, 25)]), replace(GREEDY, stop=STOPS)
    whole = {
        one.name: row
        for one, row in zip(single(request, params), rows(engine.run(generate, request, params)))
    }
    left = [
        replace(one, sampled=tuple(whole[one.name][:-1]))
        for one in single(request, params)
        if len(whole[one.name]) > 1
    ]
    found = engine.run(finish, left)
    assert all(found[one.name].tokens.tolist() == whole[one.name][-1:] for one in left) and len(left) > 10


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_k": 4}, {"top_k": 9, "top_p": 0.9}])
def test_log_probs_are_the_trainers_whatever_is_filtered(
    engine: EngineProcess, models: list[PreTrainedModel], temperature: float, filters: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=16, temperature=temperature, **filters)
    request = make_request([3, 8, 17], samples=8)
    assert_trainers_log_probs(partial(engine.run, generate), models[0], request, params)


def test_filters_leave_out_what_native_leaves_out(
    engine: EngineProcess, models: list[PreTrainedModel]
) -> None:
    request = make_request([6], samples=400)
    for params in (SamplingParams(max_tokens=1, top_k=3), SamplingParams(max_tokens=1, top_p=0.5)):
        sampled = {row[0] for row in rows(engine.run(generate, request, params))}
        native = {row[0] for row in rows(NativeEngine(models[0]).generate(request, params))}
        assert sampled == native and len(sampled) < VOCABULARY / 2


@pytest.mark.parametrize("updated", [False, True])
def test_an_aborted_response_is_continued_with_the_weights_of_then(
    engine: EngineProcess, models: list[PreTrainedModel], updated: bool
) -> None:
    """Also after the weights have changed: nothing of the old keys and values is left."""
    request = make_request([3, 9, 17, 40])
    params = replace(GREEDY, ignore_eos=True)
    wanted = single(request, params)
    short = replace(wanted[0], name="short", params=replace(params, max_tokens=5))
    complete, aborted = engine.run(begin, [short, *wanted])
    assert [(one.name, len(one.tokens)) for one in complete] == [("short", 5)]
    so_far = {one.name: one for one in aborted}
    assert {one.finish_reason for one in aborted} == {ABORT}
    assert all(4 <= len(one.tokens) == len(one.log_probs) <= 6 for one in aborted) and len(aborted) == 4
    if updated:
        load(engine, models[1])
    now = models[1] if updated else models[0]
    left = [replace(one, sampled=tuple(so_far[one.name].tokens.tolist())) for one in wanted]
    found = engine.run(finish, left)
    expected = finish(NativeEngine(now), left)  # type: ignore[arg-type]
    for one in left:
        assert found[one.name].tokens.tolist() == expected[one.name].tokens.tolist()
        log_probs = expected_log_probs(now, one.context, found[one.name].tokens, 1.0)
        assert float((found[one.name].log_probs - log_probs).abs().max()) < NEAR
    if not updated:
        whole = rows(NativeEngine(now).generate(request, params))
        assert [[*one.sampled, *found[one.name].tokens.tolist()] for one in left] == whole


def test_a_response_that_was_aborted_before_it_began_is_empty(
    engine: EngineProcess, models: list[PreTrainedModel]
) -> None:
    request = make_request([3, 40])
    wanted = single(request, GREEDY)
    aborted = engine.run(abort_at_once, wanted)
    assert [one.finish_reason for one in aborted] == [ABORT, ABORT]
    assert [(len(one.tokens), len(one.log_probs)) for one in aborted] == [(0, 0), (0, 0)]
    found = engine.run(finish, wanted)
    whole = rows(NativeEngine(models[0]).generate(request, GREEDY))
    assert [found[one.name].tokens.tolist() for one in wanted] == whole


def test_samples_follow_the_distribution(engine: EngineProcess, models: list[PreTrainedModel]) -> None:
    assert_samples_follow_the_distribution(partial(engine.run, generate), models[0])


def test_samples_depend_on_their_key_and_not_on_what_else_is_sampled(engine: EngineProcess) -> None:
    request, params = make_request([3, 9, 17, 40], samples=4), SamplingParams(max_tokens=16, ignore_eos=True)
    together = rows(engine.run(generate, request, params))
    for i in (2, 0):
        alone = GenerationRequest([request.prompts[i]], [4], [request.keys[i]])
        assert rows(engine.run(generate, alone, params)) == together[4 * i : 4 * i + 4]
    other = GenerationRequest([request.prompts[2]], [4], [(0, 8, "uid2")])
    assert rows(engine.run(generate, other, params)) != together[8:12]


def test_end_tokens(engine: EngineProcess, models: list[PreTrainedModel]) -> None:
    request = make_request([5, 6, 7, 12], samples=20)
    assert_ends_with_end_tokens(partial(engine.run, generate), models[0], request)


@pytest.mark.parametrize("max_bytes", [1000, 10_000, 10**6], ids=["parts", "some weights", "all"])
def test_three_updates_in_a_row(
    process: EngineProcess, models: list[PreTrainedModel], max_bytes: int
) -> None:
    """In parts of one tensor, every boundary splits q, k and v, and gate and up. Afterwards the weights are
    those that were sent, also the head of a tied model, and so are the log-probabilities."""
    request = make_request([3, 9, 17], samples=2)
    for model in (models[1], models[2], models[0]):
        load(process, model, max_bytes)
        output = process.run(generate, request, SamplingParams(max_tokens=16))
        assert largest_gap(model, request, output, 1.0) < NEAR
        found = process.run(held)
        assert set(weights(model)) <= set(found)
        assert all(torch.equal(found[name], tensor) for name, tensor in weights(model).items())


def test_a_compiled_model_follows_updates_and_sleeps() -> None:
    """Compiled code would keep what the first weights were packed to. One layer has all kinds of weights, and
    each more is compiled, too."""
    config = copy.deepcopy(MODELS["tied"])
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    engine = EngineProcess(config, max_num_seqs=8, enforce_eager=False)
    try:
        request = make_request([3, 9, 17], samples=2)
        for seed in (1, 2):
            torch.manual_seed(seed)
            model = make(config)
            for parameter in model.parameters():
                parameter.data.add_(torch.randn(parameter.shape) * 0.1)
            load(engine, model)
            output = engine.run(generate, request, SamplingParams(max_tokens=16))
            assert largest_gap(model, request, output, 1.0) < NEAR
            engine.run(sleep)
    finally:
        engine.stop()


def test_a_borrowed_stream(process: EngineProcess, models: list[PreTrainedModel]) -> None:
    process.run(update_borrowed, weights(models[1]))
    found = process.run(held)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(models[1]).items())


def test_keys_and_values_of_old_weights_are_not_used(
    engine: EngineProcess, models: list[PreTrainedModel]
) -> None:
    """The prompt's first block is kept for later requests, until the weights change. Of as many tokens, the
    sums differ more."""
    request = make_request([MORE_THAN_A_BLOCK])
    for model in (models[0], models[1], models[0]):
        load(engine, model)
        for _ in range(2):  # the second time from the cache
            output = engine.run(generate, request, SamplingParams(max_tokens=16))
            assert largest_gap(model, request, output, 1.0) < 10 * NEAR


def test_weights_that_are_not_numbers_leave_nothing_behind(
    engine: EngineProcess, models: list[PreTrainedModel]
) -> None:
    request = make_request([3, 9, MORE_THAN_A_BLOCK], samples=4)
    broken = copy.deepcopy(models[0])
    for parameter in broken.parameters():
        parameter.data.fill_(torch.nan)
    load(engine, broken)
    with pytest.raises(FloatingPointError, match="not finite"):
        engine.run(generate, request, SamplingParams(max_tokens=16))
    load(engine, models[0])
    output = engine.run(generate, request, SamplingParams(max_tokens=16))
    assert largest_gap(models[0], request, output, 1.0) < 10 * NEAR


def test_it_sleeps(engine: EngineProcess, models: list[PreTrainedModel]) -> None:
    request = make_request([3, 9])
    before = rows(engine.run(generate, request, GREEDY))
    assert engine.run(packed) == {True}
    awake, asleep = engine.run(sleep)
    assert engine.run(packed) == {False}
    config = MODELS["tied"]  # both have the same cache
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * 32
    assert awake - asleep > 0.8 * 4 * numbers * 64 * 256, "64 rows of 256 tokens"
    engine.run(sleep)  # a second one changes nothing
    with pytest.raises(RuntimeError, match="the engine is asleep"):
        engine.run(generate, request, GREEDY)
    load(engine, models[0], max_bytes=10_000)
    assert rows(engine.run(generate, request, GREEDY)) == before


def test_its_cache_is_what_the_plan_estimates(name: str, engine: EngineProcess) -> None:
    shape = shape_of(MODELS[name].to_dict())
    planned = ServingEngineMemory(shape, 4, tensor=1, pipeline=1, share=0.5, device_bytes=None, shared=True)
    assert engine.run(cache_bytes) == planned.sample_on_cpu(64, 256, None).kv_cache


def test_an_engine_that_failed_samples_the_next_request(engine: EngineProcess) -> None:
    request = make_request([3, 9], samples=4)
    before = rows(engine.run(generate, request, GREEDY))
    assert engine.run(fail_while_it_samples, make_request([5, 7], samples=3), GREEDY) == "failed"
    assert rows(engine.run(generate, request, GREEDY)) == before


def test_what_does_not_fit_is_refused(engine: EngineProcess, models: list[PreTrainedModel]) -> None:
    with pytest.raises(ValueError, match="prompt 1 has 250 tokens; .* is 270, more than .*max_model_len=256"):
        engine.run(generate, make_request([3, 250]), GREEDY)
    with pytest.raises(ValueError, match="prompt 0 holds token 23; the vocabulary has 23"):
        engine.run(generate, GenerationRequest([torch.tensor([23])], [1], [(0,)]), GREEDY)
    first, *others = weights(models[0]).items()
    with pytest.raises(ValueError, match="has no weight model.norms.weight; did you mean model.norm.weight?"):
        engine.run(update, [[("model.norms.weight", torch.ones(32))]])
    with pytest.raises(ValueError, match=rf"weight {first[0]} has shape \(2, 2\)"):
        engine.run(update, [[(first[0], torch.ones(2, 2))]])
    with pytest.raises(ValueError, match=f"1 of .* are missing: {first[0]}"):
        engine.run(update, [others])
    with pytest.raises(RuntimeError, match="failed half-way"):
        engine.run(generate, make_request([3]), GREEDY)


def test_tied_weights_may_come_under_both_names_but_must_agree(
    name: str, engine: EngineProcess, models: list[PreTrainedModel]
) -> None:
    if name == "untied":
        pytest.skip("this model's head is its own")
    stream = list(weights(models[1]).items())
    embedding = dict(stream)["model.embed_tokens.weight"]
    engine.run(update, [[*stream, ("lm_head.weight", embedding)]])
    only_head = [("lm_head.weight", embedding), *stream[1:]]
    load(engine, models[0])
    engine.run(update, [only_head])
    request = make_request([3, 9])
    assert largest_gap(models[1], request, engine.run(generate, request, GREEDY), 1.0) < NEAR
    with pytest.raises(ValueError, match="are one tensor .* but were sent with different values"):
        engine.run(update, [[*stream, ("lm_head.weight", embedding + 1)]])


def assert_refused(process: EngineProcess, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        process.run(held)
    process.stop()


def lack_a_call() -> None:
    """As a release that has renamed it."""
    from vllm.v1.engine.llm_engine import LLMEngine

    del LLMEngine.from_vllm_config


def test_what_vllm_does_not_run_is_refused() -> None:
    """A model, an argument with a wrong value, an older version, one without a method that is called: before
    anything is sampled."""
    small, short = copy.deepcopy(MODELS["untied"]), copy.deepcopy(MODELS["untied"])
    small.head_dim, short.max_position_embeddings = 8, 64
    wrong = EngineKwargs({"kv_cache_dtype": "int3"})
    for process, words in (
        (EngineProcess(small), "rejects .* no attention for heads of size 8"),
        (EngineProcess(short), "rejects .*max_model_len .256. is greater"),
        (EngineProcess(MODELS["untied"], engine_kwargs=wrong), "rejects .*: cache_dtype: Input should be"),
        (EngineProcess(MODELS["untied"], needed="99.1"), "needs vLLM 99.1 or newer; .* is installed"),
        (
            EngineProcess(MODELS["untied"], before=lack_a_call),
            "lacks an API that hydraflow uses: .*from_vllm_config",
        ),
    ):
        assert_refused(process, f"rollout.name=vllm: .*{words}")


def test_weights_that_vllm_holds_under_another_form_or_name_are_read_back() -> None:
    """GPT-2's are transposed; Gemma 2 has no head of its own."""
    gpt2, gemma = copy.deepcopy(CONFIGS["gpt2"]), config_of("gemma2, window in every other layer")
    gpt2.n_embd, gpt2.n_head, gpt2.n_positions = 64, 2, 256
    gemma.attn_logit_softcapping = None  # the plain forward's SDPA has none
    for config in (gpt2, gemma):
        process, model = EngineProcess(config, max_num_seqs=8), make(config)
        load(process, model, max_bytes=10_000)
        found = process.run(held)
        assert set(weights(model)) <= set(found)
        assert all(torch.equal(found[name], tensor) for name, tensor in weights(model).items())
        request = make_request([3, 9, 17], samples=2)
        output = process.run(generate, request, SamplingParams(max_tokens=16))
        assert largest_gap(model, request, output, 1.0) < 10 * NEAR
        process.stop()


def test_weights_that_could_not_be_compared_are_refused_at_once() -> None:
    """Before anything is sent: a latent attention, of which products of weights are kept, and classes that
    are transformers' own."""
    larger = {**SMALL, "head_dim": 32, "max_position_embeddings": 256}
    by_transformers = Olmo2Config(**{name: value for name, value in larger.items() if name != "head_dim"})
    latent = DeepseekV3Config(**larger, q_lora_rank=None, kv_lora_rank=16)
    for config, words in (
        (by_transformers, "Olmo2ForCausalLM [^\n]* patch the class in transformers"),
        (
            latent,
            "DeepseekV3ForCausalLM [^\n]* attention .MLA. caches products of weights, which would go stale\n",
        ),
    ):
        rule = rf"vllm: vLLM does not hold [^\n]*{words}(?s:.*)name=native"
        assert_refused(EngineProcess(config), rule)


def start_no_python() -> None:
    """Another one would import vLLM again."""
    run = subprocess.run

    def watched(command: Any, *args: Any, **how: Any) -> Any:
        assert sys.executable not in command, f"starts {command}"
        return run(command, *args, **how)

    subprocess.run = watched  # type: ignore[assignment]


def test_it_leaves_no_file_and_no_open_port_and_starts_no_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where vLLM has never seen a model of that class."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    process = EngineProcess(MODELS["tied"], before=start_no_python)
    assert process.run(listening) <= {"127.0.0.1", "::1"}
    assert list(tmp_path.glob("vllm_dist*")) == []
    process.stop()


def test_prompts_in_parts() -> None:
    """With chunked prefill, which on a CPU goes without seeds."""
    process = EngineProcess(
        MODELS["tied"], max_num_seqs=8, max_num_batched_tokens=16, enable_chunked_prefill=True
    )
    model = make(MODELS["tied"])
    load(process, model)
    request, params = make_request([40, 100], samples=2), SamplingParams(max_tokens=8, temperature=0.7)
    assert largest_gap(model, request, process.run(generate, request, params), 0.7) < 10 * NEAR
    assert rows(process.run(generate, request, GREEDY)) == rows(NativeEngine(model).generate(request, GREEDY))
    process.stop()
