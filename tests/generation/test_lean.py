"""The decoding step of known models, against their own forward, and its joined weights."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from generation.test_native import SMALL, make, make_request, rows, weights
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hydraflow.generation import forward
from hydraflow.generation.base import SamplingParams
from hydraflow.generation.forward import CachedForward
from hydraflow.generation.lean import LeanForward, is_known
from hydraflow.generation.native import NativeEngine
from hydraflow.generation.weights import first_difference
from hydraflow.models import openblas
from hydraflow.protocol import ragged

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "llama, biases, every head its own keys": LlamaConfig(
        **SMALL | dict(num_key_value_heads=4), attention_bias=True, mlp_bias=True
    ),
    "llama 3's rotary tables": LlamaConfig(
        **SMALL,
        rope_parameters=dict(rope_type="llama3", rope_theta=500.0, factor=4.0)
        | dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "llama, rotary tables that depend on the longest row": LlamaConfig(
        **SMALL, rope_parameters=dict(rope_type="dynamic", rope_theta=500.0, factor=4.0)
    ),
    "mistral, a wide MLP": MistralConfig(**SMALL | dict(intermediate_size=128), sliding_window=None),
    "qwen2": Qwen2Config(**{name: value for name, value in SMALL.items() if name != "head_dim"}),
    "qwen3, no powers of two": Qwen3Config(
        **SMALL | dict(hidden_size=96, intermediate_size=100, head_dim=24)
    ),
    "qwen3, gelu": Qwen3Config(
        **SMALL | dict(intermediate_size=64), tie_word_embeddings=True, hidden_act="gelu"
    ),
}
EXPERTS = SMALL | dict(num_experts_per_tok=2, sliding_window=None)
MIXTURES: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**EXPERTS, num_local_experts=6),
    "qwen2_moe, a shared expert": Qwen2MoeConfig(
        **EXPERTS, num_experts=6, moe_intermediate_size=24, shared_expert_intermediate_size=40
    ),
    "qwen3_moe, a dense layer": Qwen3MoeConfig(
        **EXPERTS, num_experts=6, moe_intermediate_size=24, mlp_only_layers=[0]
    ),
}


def model_of(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """Every norm and bias has weights of its own."""
    model = make((CONFIGS | MIXTURES)[name], dtype)
    draw = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p.ndim == 1:
            p.data.copy_(torch.randn(p.shape, generator=draw) * 0.3 + 1)
    return model


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *product(CONFIGS, [torch.float64]),  # not the mixtures: torch multiplies no experts in it
        *product(CONFIGS | MIXTURES, [torch.float32, torch.bfloat16]),
    ],
)
@pytest.mark.parametrize("by_openblas", [False, True])
def test_a_step_is_that_of_the_models_own_forward(
    name: str, dtype: torch.dtype, by_openblas: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openblas, "is_faster", lambda: by_openblas)
    model, request = model_of(name, dtype), make_request([3, 9, 4], samples=6)
    params = SamplingParams(max_tokens=24, ignore_eos=True)  # more than a first table of rotations
    engine = NativeEngine(model)
    found = engine.generate(request, params)
    assert isinstance(engine._forward._lean, LeanForward)
    monkeypatch.setattr(forward, "is_known", lambda _: False)
    wanted = NativeEngine(model).generate(request, params)
    assert rows(found) == rows(wanted)
    # norms are float32 in every type
    close = 1e-5 if dtype == torch.float64 else 0.0
    got, own = (ragged.parts(one.log_probs)[0] for one in (found, wanted))
    assert float((got - own).abs().max()) <= close


def test_a_class_that_derives_from_a_known_one_runs_its_own_forward() -> None:
    class Other(LlamaForCausalLM):
        pass

    assert not is_known(Other(CONFIGS["llama"]))


def test_joined_weights_are_the_models_and_new_ones_arrive_in_them() -> None:
    model, other = model_of("qwen2", torch.float32), make(CONFIGS["qwen2"])
    request, params = make_request([5, 6], samples=4), SamplingParams(max_tokens=6)
    engine = NativeEngine(model)
    engine.generate(request, params)
    attention = model.model.layers[0].self_attn
    storages = {p.untyped_storage().data_ptr() for p in (attention.q_proj.weight, attention.v_proj.weight)}
    assert len(storages) == 1, "one tensor, and no copy of it"
    for _ in range(2):
        engine.update_weights(weights(other).items())
        assert first_difference(engine.held(), weights(other).items()) is None
        assert rows(engine.generate(request, params)) == rows(NativeEngine(other).generate(request, params))
        engine.sleep()  # the second round finds other tensors


def test_weights_that_sleep_are_held_by_nobody() -> None:
    engine = NativeEngine(model_of("llama", torch.float32))
    engine.generate(make_request([5]), SamplingParams(max_tokens=2))
    assert isinstance(engine._forward, CachedForward) and isinstance(engine._forward._lean, LeanForward)
    engine.sleep()
    assert engine._forward._lean is None
