"""Parameter counts: against models that transformers builds, and against published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from memory.published import PUBLISHED

from hydraflow.errors import ConfigError
from hydraflow.memory.shape import ModelShape, read_shape, shape_of
from hydraflow.models.config import ModelSourceConfig

SIZES: dict[str, Any] = dict(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
EXPERTS: dict[str, Any] = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12)

MODELS = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "llama tied": ("Llama", dict(tie_word_embeddings=True)),
    "mistral with its own head_dim": ("Mistral", dict(head_dim=10)),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(head_dim=8)),
    "qwen3 with biases, default head_dim": ("Qwen3", dict(attention_bias=True)),
    "qwen3 experts": ("Qwen3Moe", dict(head_dim=8, **EXPERTS)),
    "qwen3 experts in every second layer": ("Qwen3Moe", dict(head_dim=8, decoder_sparse_step=2, **EXPERTS)),
    "qwen3 experts but in the first layer": ("Qwen3Moe", dict(head_dim=8, mlp_only_layers=[0], **EXPERTS)),
    "qwen2 experts and a shared one": ("Qwen2Moe", dict(shared_expert_intermediate_size=20, **EXPERTS)),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "granite": ("Granite", {}),
    "phi3": ("Phi3", dict(pad_token_id=0)),
    "gemma": ("Gemma", dict(head_dim=8)),
}


def built(name: str, options: dict[str, Any]) -> tuple[Any, ModelShape]:
    """A model of that class on the meta device, and the shape read from the file that it would write."""
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    return model, shape_of(json.loads(config.to_json_string(use_diff=False)))


@pytest.mark.parametrize(("name", "options"), MODELS.values(), ids=MODELS)
def test_counts_are_those_of_the_real_model(name: str, options: dict[str, Any]) -> None:
    model, shape = built(name, options)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.largest_tensor == max(p.numel() for p in model.parameters())
    assert shape.notes == ()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    parameters, config = PUBLISHED[name]
    assert shape_of(config).parameters == parameters


def test_a_critic_has_one_output() -> None:
    assert shape_of(SIZES).value_parameters == shape_of(SIZES).parameters - 50 * 24 + 24
    tied = shape_of({**SIZES, "tie_word_embeddings": True})
    assert tied.value_parameters == tied.parameters + 24


def test_missing_and_impossible_sizes_are_named_together() -> None:
    with pytest.raises(ConfigError) as caught:
        shape_of({**SIZES, "vocab_size": 0, "hidden_size": None})
    assert [problem.field.rsplit(".", 1)[1] for problem in caught.value.problems] == [
        "vocab_size",
        "hidden_size",
    ]
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        shape_of({key: value for key, value in SIZES.items() if key != "num_hidden_layers"})
    with pytest.raises(ConfigError, match="mlp_only_layers=2, which must be a list"):
        shape_of({**SIZES, "num_experts": 4, "mlp_only_layers": 2})


def test_an_unknown_model_is_counted_as_a_llama_and_says_so() -> None:
    shape = shape_of({"model_type": "brandnew", **SIZES})
    assert shape.parameters == shape_of({"model_type": "llama", **SIZES}).parameters
    assert "brandnew" in shape.notes[0]


def test_the_language_model_of_a_multimodal_file() -> None:
    shape = shape_of({"model_type": "qwen2_vl", "text_config": {"model_type": "qwen2", **SIZES}})
    assert shape.model_type == "qwen2" and "qwen2_vl" in shape.notes[0]


def test_read_from_a_directory_with_overrides(tmp_path: Path, tiny: str) -> None:
    real = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    shape = read_shape(ModelSourceConfig(path=tiny))
    assert shape is not None and shape.parameters == sum(p.numel() for p in real.parameters())
    deeper = read_shape(ModelSourceConfig(path=tiny, override_config={"num_hidden_layers": 7}))
    assert deeper is not None and deeper.layers == 7
    assert read_shape(ModelSourceConfig(path="Qwen/Qwen2.5-7B")) is None
    assert read_shape(ModelSourceConfig(path=None)) is None
    described = read_shape(ModelSourceConfig(path="Qwen/Qwen2.5-7B", override_config=SIZES))
    assert described is not None and described.hidden == 24
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json"):
        read_shape(ModelSourceConfig(path=str(tmp_path)))
