"""Modules for low-rank adapters that the model does not have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, FalconConfig, LlamaConfig, MambaConfig

from hydraflow.engine.fsdp.lora import add_adapters, require_targets
from hydraflow.errors import ConfigError
from hydraflow.models.config import ModelConfig
from hydraflow.models.loading import load_config

LINEAR = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"


def look(tiny: str, targets: object, head: str) -> None:
    model = ModelConfig(path=tiny, lora_rank=4, target_modules=targets)
    require_targets(model, load_config(model), head=head, field="critic.model")


@pytest.mark.parametrize("head", ["policy", "value"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "mlp.up_proj"], ".*_proj"])
def test_modules_that_are_there(tiny: str, targets: object, head: str) -> None:
    look(tiny, targets, head)


@pytest.mark.parametrize(
    ("targets", "rule"),
    [
        (["query", "c_attn"], f"the model has no module query and no c_attn; its linear layers are {LINEAR}"),
        (
            "query",
            "names no linear layer of this model (no module matches query); they are q_proj",
        ),
        ("*proj", "names no linear layer of this model (nothing to repeat at position 0); they are q_proj"),
        (["norm"], "names no linear layer of this model"),
        (["embed_tokens"], "embeddings cannot have adapters"),
    ],
)
def test_modules_that_are_not_there(tiny: str, targets: object, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        look(tiny, targets, "value")
    [problem] = caught.value.problems
    assert re.match(".*".join(map(re.escape, rule.split(".*"))), problem.rule), problem.rule
    assert (problem.field, problem.remedy) == (
        "critic.model.target_modules",
        "critic.model.target_modules=all-linear",
    )


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], ["lm_head"], "lm_head|.*q_proj"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_output_matrix_that_is_the_embedding(tmp_path: Path, tied: bool, targets: object) -> None:
    """Its adapter would be trained and lost: the generation engine and the trained model tie the two."""
    sizes = dict(
        vocab_size=17, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    LlamaConfig(**sizes, tie_word_embeddings=tied).save_pretrained(tmp_path)
    if not tied:
        return look(str(tmp_path), targets, "policy")
    with pytest.raises(ConfigError) as caught:
        look(str(tmp_path), targets, "policy")
    [problem] = caught.value.problems
    assert "an adapter of lm_head cannot be kept apart from the embeddings" in problem.rule
    kept = "[q_proj]" if targets == ["q_proj", "lm_head"] else "all-linear"
    assert problem.remedy == f"critic.model.target_modules={kept}"


@pytest.mark.parametrize("targets", ["all-linear", "query", ["query"]])
def test_a_model_with_a_linear_layer_of_its_own_has_a_remedy_that_works(targets: object) -> None:
    config = FalconConfig(vocab_size=17, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    with torch.device("meta"):
        falcon = AutoModelForCausalLM.from_config(config)
    names = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
    with pytest.raises(ConfigError) as caught:
        add(falcon, targets)
    [problem] = caught.value.problems
    assert problem.remedy == f"model.target_modules=[{','.join(names)}]"
    add(falcon, names)
    assert len([name for name, _ in falcon.named_parameters() if ".lora_A." in name]) == len(names)


def test_a_layer_that_the_code_does_not_call_gets_no_adapter() -> None:
    """Mamba multiplies by the weight of `dt_proj` itself."""
    config = MambaConfig(vocab_size=17, hidden_size=8, state_size=4, num_hidden_layers=1)
    with torch.device("meta"):
        named, mamba = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    with pytest.raises(ConfigError) as caught:
        add(named, ["in_proj", "dt_proj"])
    [problem] = caught.value.problems
    assert problem.rule.startswith("backbone.layers.0.mixer.dt_proj cannot have an adapter")
    assert problem.remedy == "model.target_modules=[in_proj]"
    add(mamba, "all-linear")
    found = {name.split(".")[-4] for name, _ in mamba.named_parameters() if ".lora_A." in name}
    assert found == {"in_proj", "x_proj", "out_proj"}


def add(hf: torch.nn.Module, targets: object) -> None:
    model = ModelConfig(path="falcon", lora_rank=4, target_modules=targets)
    add_adapters(hf, model, torch.float32, field="model")


def test_a_list_that_fits_several_models_is_taken_with_a_word(
    tiny: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As peft takes it: the usual seven names, on a model that has fused some of them."""
    look(tiny, ["q_proj", "qv_proj"], "policy")
    assert f"the model has no module qv_proj; its linear layers are {LINEAR}" in caplog.text
