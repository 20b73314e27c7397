"""vLLM with adapters beside the weights: what the merged model computes, after every update, of which all but
the first bring the adapters alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from generation.test_native import add_noise, largest_gap, make, make_request, rows, weights
from generation.test_vllm import GREEDY, MODELS, NEAR, assert_refused, generate, held, sleep, update
from generation.vllm_process import EngineProcess, needs_vllm
from torch import Tensor, nn
from transformers import PreTrainedModel

from hydraflow.generation.base import SamplingParams
from hydraflow.generation.native import NativeEngine
from hydraflow.generation.vllm import VllmEngine
from hydraflow.models.adapters import AdapterLayers, add_shapes
from hydraflow.weights.buckets import NamedTensor, Weight

pytestmark = [needs_vllm, pytest.mark.slow]

RANK = 3
"""vLLM has room for 1, 8, 16 and so on."""
LAYERS = AdapterLayers(RANK, "all-linear")
Adapter = dict[str, Tensor]


@pytest.fixture(scope="module", params=MODELS)
def base(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make(MODELS[request.param])


@pytest.fixture(scope="module")
def process(base: PreTrainedModel) -> Iterator[EngineProcess]:
    engine = EngineProcess(base.config, max_num_seqs=16, adapters=LAYERS)
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def adapters(base: PreTrainedModel) -> list[Adapter]:
    """Three that differ in every number."""
    return [drawn(base, seed) for seed in range(3)]


def drawn(base: PreTrainedModel, seed: int) -> Adapter:
    shapes, draw, adapter = dict(weights(base)), torch.Generator().manual_seed(seed), {}
    named = base.named_modules()
    for layer in [name for name, part in named if isinstance(part, nn.Linear) and name != "lm_head"]:
        outputs, inputs = shapes[f"{layer}.weight"].shape
        adapter[f"{layer}.lora_A.weight"] = torch.randn((RANK, inputs), generator=draw) * 0.2
        adapter[f"{layer}.lora_B.weight"] = torch.randn((outputs, RANK), generator=draw) * 0.2
    return adapter


def merged(base: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    """W + B A, in float64 and rounded once."""
    model = copy.deepcopy(base)
    for name, a in adapter.items():
        if ".lora_A." in name:
            b = adapter[name.replace(".lora_A.", ".lora_B.")]
            weight = model.get_parameter(name.replace(".lora_A.", "."))
            weight.data = (weight.data.double() + b.double() @ a.double()).float()
    return model


def send(process: EngineProcess, *parts: dict[str, Tensor]) -> None:
    stream: list[list[Weight]] = [list(part.items()) for part in parts]
    process.run(update, stream)


def number_again(engine: VllmEngine, stream: list[NamedTensor]) -> None:
    engine._adapter -= 1
    engine.update_weights(iter(stream))


def assert_it_is(process: EngineProcess, model: PreTrainedModel, sent: dict[str, Tensor]) -> None:
    request = make_request([1, 3, 9, 40], samples=2)
    assert rows(process.run(generate, request, GREEDY)) == rows(NativeEngine(model).generate(request, GREEDY))
    for temperature in (1.0, 0.7):
        params = SamplingParams(max_tokens=16, temperature=temperature)
        assert largest_gap(model, request, process.run(generate, request, params), temperature) < NEAR
    found = process.run(held)
    assert all(torch.equal(found[name], tensor) for name, tensor in sent.items())


def test_every_update_is_computed_with_though_only_adapters_come(
    process: EngineProcess, base: PreTrainedModel, adapters: list[Adapter]
) -> None:
    """Three in a row, then the base weights change, too. A prompt of more than a block would be
    found in the cache if that outlived an update."""
    plain = dict(weights(base))
    send(process, plain, adapters[0])
    assert_it_is(process, merged(base, adapters[0]), plain | adapters[0])
    before = rows(process.run(generate, make_request([9, 40]), GREEDY))
    assert before != rows(NativeEngine(base).generate(make_request([9, 40]), GREEDY)), "adapters matter"
    for adapter in (adapters[1], adapters[2], adapters[0]):
        send(process, adapter)
        assert_it_is(process, merged(base, adapter), plain | adapter)
    assert rows(process.run(generate, make_request([9, 40]), GREEDY)) == before
    other = copy.deepcopy(base)
    add_noise(other, 0)
    send(process, dict(weights(other)), adapters[1])
    assert_it_is(process, merged(other, adapters[1]), dict(weights(other)) | adapters[1])


def test_it_keeps_the_base_weights_while_it_sleeps(
    process: EngineProcess, base: PreTrainedModel, adapters: list[Adapter]
) -> None:
    send(process, dict(weights(base)), adapters[0])
    process.run(sleep)
    with pytest.raises(RuntimeError, match="the engine is asleep"):
        process.run(generate, make_request([3]), GREEDY)
    send(process, adapters[1])
    assert_it_is(process, merged(base, adapters[1]), dict(weights(base)) | adapters[1])


def test_a_number_that_vllm_knows_is_refused(
    process: EngineProcess, base: PreTrainedModel, adapters: list[Adapter]
) -> None:
    """It would keep the old adapter."""
    send(process, dict(weights(base)), adapters[0])
    with pytest.raises(RuntimeError, match=r"vLLM already has an adapter \d+ and would keep it"):
        process.run(number_again, list(adapters[1].items()))
    with pytest.raises(RuntimeError, match="failed half-way"):
        process.run(generate, make_request([3]), GREEDY)
    send(process, adapters[2])
    assert_it_is(process, merged(base, adapters[2]), adapters[2])


def test_what_is_missing_is_named(
    process: EngineProcess, base: PreTrainedModel, adapters: list[Adapter]
) -> None:
    plain, (first, *others) = dict(weights(base)), adapters[0]
    send(process, plain, adapters[0])
    with pytest.raises(ValueError, match=f"1 of .* are missing: {first}"):
        send(process, {name: adapters[0][name] for name in others})
    embedding, *rest = plain
    with pytest.raises(ValueError, match=f"1 of .* are missing: {embedding}"):
        send(process, {name: plain[name] for name in rest}, adapters[0])
    with pytest.raises(ValueError, match="are missing"):  # what came before is not what is below these
        send(process, {rest[0]: plain[rest[0]]}, adapters[0])


def test_layers_that_vllm_gives_no_adapter_are_refused_at_once() -> None:
    for layers, words in (
        (AdapterLayers(RANK, ("q_proj", "lm_head")), "no place for the adapter of lm_head"),
        (AdapterLayers(513, ("q_proj",)), "adapters up to rank 512, the model's have rank 513"),
    ):
        process = EngineProcess(MODELS["untied"], adapters=layers)
        assert_refused(process, rf"rollout.name=vllm: vLLM [^\n]*{words}")


def test_layers_may_be_some_of_those_of_a_fused_one(base: PreTrainedModel) -> None:
    """v alone of q, k and v; q has none."""
    if base.config.tie_word_embeddings:
        pytest.skip("one model is enough")
    layers = AdapterLayers(8, ("v_proj", "down_proj"))
    shaped = copy.deepcopy(base).to("meta")
    add_shapes(layers, shaped)
    draw = torch.Generator().manual_seed(1)
    adapter = {
        name: torch.randn(one.shape, generator=draw) * 0.2
        for name, one in shaped.named_parameters()
        if ".lora_" in name
    }
    process = EngineProcess(base.config, max_num_seqs=8, adapters=layers)
    send(process, dict(weights(base)), adapter)
    assert_it_is(process, merged(base, adapter), adapter)
    process.stop()
