"""What a user reads when a model directory is not what it should be."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hydraflow.errors import ConfigError
from hydraflow.models import loading
from hydraflow.models.config import ModelConfig
from hydraflow.models.tiny import make_model


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_model(tmp_path / "tiny", hidden=32, layers=2, heads=2, kv_heads=1)


def problem(error: pytest.ExceptionInfo[ConfigError]) -> tuple[str, str]:
    (only,) = error.value.problems
    return only.field, only.rule


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        loading.load_config(ModelConfig(path=str(tmp_path)))
    assert problem(error) == (
        "actor_rollout_ref.model.path",
        "this directory has no config.json, so it is not a Hugging Face model",
    )


def test_no_such_directory_and_no_path() -> None:
    with pytest.raises(ConfigError, match="critic.model.path=/nowhere/at/all: there is no such directory"):
        loading.load_config(ModelConfig(path="/nowhere/at/all"), field="critic.model")
    with pytest.raises(ConfigError, match="no model is named"):
        loading.load_config(ModelConfig())


def test_directory_without_tokenizer(tiny: Path) -> None:
    for file in tiny.glob("*token*"):
        file.unlink()
    with pytest.raises(ConfigError) as error:
        loading.load_tokenizer(ModelConfig(path=str(tiny)))
    assert problem(error)[0] == "actor_rollout_ref.model.path"
    assert "no tokenizer" in problem(error)[1]


def test_tokenizer_without_chat_template(tiny: Path) -> None:
    for file in tiny.glob("chat_template*"):
        file.unlink()
    described = json.loads((tiny / "tokenizer_config.json").read_text())
    described.pop("chat_template", None)
    (tiny / "tokenizer_config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match="no chat template"):
        loading.load_tokenizer(ModelConfig(path=str(tiny)))
    assert loading.load_tokenizer(ModelConfig(path=str(tiny)), chat=False).chat_template is None
    own = loading.load_tokenizer(
        ModelConfig(path=str(tiny), custom_chat_template="{{ messages[0]['content'] }}!")
    )
    assert own.apply_chat_template([{"role": "user", "content": "1+1"}], tokenize=False) == "1+1!"


def test_overrides_replace_and_unknown_ones_are_named(tiny: Path) -> None:
    assert (
        loading.load_config(ModelConfig(path=str(tiny), override_config={"rms_norm_eps": 0.5})).rms_norm_eps
        == 0.5
    )
    with pytest.raises(ConfigError, match="has no rms_eps"):
        loading.load_config(ModelConfig(path=str(tiny), override_config={"rms_eps": 0.5}))


def test_dropout_is_off(tiny: Path) -> None:
    described = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({**described, "attention_dropout": 0.1}))
    assert loading.load_config(ModelConfig(path=str(tiny))).attention_dropout == 0.0


def test_dropout_is_off_wherever_it_is_named(tmp_path: Path) -> None:
    bert_like = transformers.BioGptConfig(hidden_dropout_prob=0.1, layerdrop=0.2)
    nested = transformers.Gemma3Config(text_config={"attention_dropout": 0.3})
    found = []
    for number, config in enumerate([bert_like, nested]):
        config.save_pretrained(tmp_path / str(number))
        found.append(loading.load_config(ModelConfig(path=str(tmp_path / str(number)))))
    assert found[0].hidden_dropout_prob == found[0].layerdrop == 0.0
    assert found[1].text_config.attention_dropout == 0.0


def test_rows_end_where_other_rotary_tables_begin() -> None:
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096, **factors}
    long = transformers.Phi3Config(max_position_embeddings=131072, rope_parameters=rope)
    context = loading.context_of(long)
    assert context is not None and (context.tokens, "longrope" in context.limit) == (4096, True)
    both = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": rope}
    long.rope_parameters = both
    assert loading.context_of(long) == context, "one of several tables"
    assert loading.context_of(transformers.Phi3Config(max_position_embeddings=8192)) == loading.Context(
        8192, "the model's 8192 positions"
    )
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    dynamic = transformers.LlamaConfig(max_position_embeddings=512, rope_parameters=rope)
    assert loading.context_of(dynamic) == loading.Context(512, "the model's 512 positions"), "not 4 x 512"
    assert loading.context_of(transformers.MambaConfig()) is None


def test_missing_weights_are_never_random(tiny: Path) -> None:
    weights = load_file(tiny / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tiny / "model.safetensors", metadata={"format": "pt"})
    options = ModelConfig(path=str(tiny))
    with pytest.raises(
        ConfigError, match=r"1 weights are not in its files, the first model.layers.1.mlp.up_proj.weight"
    ):
        loading.read_weights(loading.load_config(options), options, head="policy", dtype=torch.float32)


def test_broken_weights_are_the_users_to_know(tiny: Path) -> None:
    options, file = ModelConfig(path=str(tiny)), tiny / "model.safetensors"
    config, content = loading.load_config(options), file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(ConfigError, match="its weights cannot be read: .*header"):
        loading.read_weights(config, options, head="policy", dtype=torch.float32)
    file.write_bytes(content)
    config.intermediate_size = 40
    with pytest.raises(
        ConfigError,
        match=r"6 of its weights are of another shape, .*down_proj.weight: \[32, \d+\], not \[32, 40\]",
    ):
        loading.read_weights(config, options, head="policy", dtype=torch.float32)


def test_value_head_is_zero_or_what_is_stored(tiny: Path) -> None:
    options = ModelConfig(path=str(tiny))
    config = loading.load_config(options)
    assert not loading.read_weights(config, options, head="value", dtype=torch.float32)["score.weight"].any()
    weights = load_file(tiny / "model.safetensors")
    score = torch.arange(32.0)[None]
    save_file({**weights, "score.weight": score}, tiny / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(
        loading.read_weights(config, options, head="value", dtype=torch.float32)["score.weight"], score
    )


def test_end_tokens_of_generation(tiny: Path) -> None:
    found = loading.load_generation_config(ModelConfig(path=str(tiny)))
    assert found is not None and found.eos_token_id == 1
    (tiny / "generation_config.json").unlink()
    assert loading.load_generation_config(ModelConfig(path=str(tiny))) is None


JSON_OF_ANOTHER_FORM = ["", "[]", "3", "null", "{", "[" * 100_000]


@pytest.mark.parametrize(
    "text",
    [
        *JSON_OF_ANOTHER_FORM,
        '{"model_type": ["a"]}',
        '{"model_type": "qwen3", "hidden_size": "x"}',
        '{"model_type": "llama", "num_attention_heads": 0}',
    ],
)
def test_a_config_of_another_form(tiny: Path, text: str) -> None:
    (tiny / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="cannot be read as a model: "):
        loading.load_config(ModelConfig(path=str(tiny)))


def test_an_override_of_another_type(tiny: Path) -> None:
    with pytest.raises(
        ConfigError, match="hidden_size=x is not valid for a qwen3 model: .*expected int, got str"
    ):
        loading.load_config(ModelConfig(path=str(tiny), override_config={"hidden_size": "x"}))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", [*JSON_OF_ANOTHER_FORM, '{"added_tokens": [], "model": {"type": "zz"}}'])
def test_a_tokenizer_of_another_form(tiny: Path, file: str, text: str) -> None:
    (tiny / file).write_text(text)
    with pytest.raises(ConfigError, match="holds no tokenizer that can be read: "):
        loading.load_tokenizer(ModelConfig(path=str(tiny)))


def test_a_tokenizer_s_path_that_is_no_directory(tiny: Path) -> None:
    for path, rule in (
        (tiny / "config.json", "is a file, not a directory"),
        (tiny / "gone", "there is no such directory"),
    ):
        with pytest.raises(ConfigError) as error:
            loading.load_tokenizer(ModelConfig(path=str(tiny), tokenizer_path=str(path)))
        assert problem(error) == ("actor_rollout_ref.model.tokenizer_path", rule)


@pytest.mark.parametrize("text", JSON_OF_ANOTHER_FORM)
def test_broken_end_tokens_are_not_passed_over(tiny: Path, text: str) -> None:
    (tiny / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match="its generation_config.json cannot be read: "):
        loading.load_generation_config(ModelConfig(path=str(tiny)))


LIBRARY = """
from transformers import AutoConfig, LlamaConfig

class MineConfig(LlamaConfig):
    model_type = "llama_of_mine"

AutoConfig.register("llama_of_mine", MineConfig)
"""


def test_an_architecture_that_external_lib_registers(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tiny.parent)
    (tiny.parent / "registers_llama.py").write_text(LIBRARY)
    described = json.loads((tiny / "config.json").read_text()) | {"model_type": "llama_of_mine"}
    (tiny / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match="cannot be read as a model"):
        loading.load_config(ModelConfig(path=str(tiny)))
    found = loading.load_config(ModelConfig(path=str(tiny), external_lib="registers_llama"))
    assert found.model_type == "llama_of_mine"
    del sys.modules["registers_llama"]
