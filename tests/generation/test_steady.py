"""Products of experts and of layers with one output: the rows they get, their values, and their bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from generation.test_native import SMALL, make, make_request
from torch import Tensor
from transformers import GptOssConfig, MixtralConfig, PreTrainedConfig, PreTrainedModel, Qwen2MoeConfig
from transformers.integrations import moe

from hydraflow.generation.base import GenerationRequest, SamplingParams
from hydraflow.generation.native import NativeEngine
from hydraflow.generation.steady import NAME, steady_products
from hydraflow.models.decoding_sizes import LEAST_ROWS
from hydraflow.protocol import ragged

WIDE = SMALL | dict(intermediate_size=256, num_experts_per_tok=2, sliding_window=None)
"""Products of fewer than eleven rows with 256 numbers each have other bits than those of more."""
CONFIGS: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**WIDE, num_local_experts=6),
    "gpt_oss": GptOssConfig(**WIDE | dict(sliding_window=6), num_local_experts=6),
    "gpt_oss, one key head": GptOssConfig(
        **WIDE | dict(sliding_window=6, num_attention_heads=2, num_key_value_heads=1, head_dim=16),
        num_local_experts=6,
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **WIDE, num_experts=6, moe_intermediate_size=256, shared_expert_intermediate_size=32
    ),
}


def made(name: str) -> PreTrainedModel:
    """With experts of the usual scale, whose last bits are then seen in log-probabilities."""
    model = make(CONFIGS[name])
    draw = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.ndim == 3:
            weight.data.normal_(0, 0.3, generator=draw)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_every_expert_gets_enough_rows_and_the_values_are_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = made(name), torch.arange(2, 13)[None]
    expected = model(tokens).logits
    inner, fewest = moe.grouped_mm_experts_forward, []

    def counted(module: Any, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        fewest.append(int(experts.flatten().bincount()[experts.unique()].min()))
        return inner(module, hidden, experts, weights)

    monkeypatch.setattr(moe, "grouped_mm_experts_forward", counted)
    steady_products(model)
    torch.testing.assert_close(model(tokens).logits, expected, atol=1e-5, rtol=1e-5)
    assert len(fewest) == SMALL["num_hidden_layers"] and min(fewest) >= LEAST_ROWS


def test_experts_that_no_token_chose_get_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token chooses two of six."""
    model, seen = made("mixtral"), []
    inner = moe.grouped_mm_experts_forward

    def noted(module: Any, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        seen.append(sorted(filter(None, experts.flatten().bincount().tolist())))
        return inner(module, hidden, experts, weights)

    monkeypatch.setattr(moe, "grouped_mm_experts_forward", noted)
    steady_products(model)
    model(torch.tensor([[2]]))
    assert seen == [[LEAST_ROWS] * 2] * SMALL["num_hidden_layers"]


def test_models_made_of_the_same_configuration_keep_theirs() -> None:
    model = made("mixtral")
    before = copy.deepcopy(model.config)
    steady_products(model)
    layer: Any = model.model.layers[0]
    assert layer.mlp.experts.config._experts_implementation == NAME
    assert model.config._experts_implementation == before._experts_implementation == "grouped_mm"
    assert model.config.to_dict() == before.to_dict()


AVX512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="on other CPUs the last bits may differ"
)


@AVX512
@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_have_the_same_bits_in_any_company(name: str) -> None:
    engine = NativeEngine(made(name))
    request, params = make_request([3, 30, 9, 10, 12, 5, 9, 14], samples=2), SamplingParams(max_tokens=12)
    together = ragged.rows(engine.generate(request, params).log_probs)
    for i, (prompt, key) in enumerate(zip(request.prompts, request.keys)):
        alone = ragged.rows(engine.generate(GenerationRequest([prompt], [2], [key]), params).log_probs)
        assert all(torch.equal(one, other) for one, other in zip(alone, together[2 * i : 2 * i + 2]))


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_layer_with_few_outputs(outputs: int) -> None:
    layer = torch.nn.Linear(32, outputs)
    model = made("mixtral")
    model.extra = layer
    x = torch.randn(5, 7, 32)
    expected = layer(x)
    steady_products(model)
    assert layer(x).shape == (5, 7, outputs)
    torch.testing.assert_close(layer(x), expected)


@AVX512
def test_rows_of_a_layer_with_one_output_have_the_same_bits_in_any_company() -> None:
    model = made("mixtral")
    model.extra = layer = torch.nn.Linear(1000, 1)
    steady_products(model)
    x = torch.randn(128, 1000, generator=torch.Generator().manual_seed(0))
    together = layer(x)
    for rows in range(LEAST_ROWS, 128, 7):
        assert torch.equal(layer(x[:rows]), together[:rows]), rows


def test_only_a_model_on_a_cpu_is_changed() -> None:
    model = made("mixtral").to("meta")
    model.extra = layer = torch.nn.Linear(32, 1, device="meta")
    steady_products(model)
    experts: Any = model.model.layers[0].mlp.experts
    assert experts.config._experts_implementation != NAME and type(layer) is torch.nn.Linear
