"""Weights of another model than config.json describes, found from headers alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hydraflow.errors import ConfigError
from hydraflow.models.config import ModelConfig
from hydraflow.models.fit import require_model, require_weights
from hydraflow.models.loading import load_config
from hydraflow.models.tiny import make_model
from hydraflow.models.weight_files import INDEX, PICKLE, SINGLE

FIELD = "model"


@pytest.fixture
def copy(tiny: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def look(folder: Path, *, head: str = "policy", trust: bool = False) -> None:
    model = ModelConfig(path=str(folder), trust_remote_code=trust)
    config = load_config(model, field=FIELD)
    require_model(model, config, head=head, field=FIELD)
    require_weights(model, config, head=head, field=FIELD)


def rules(folder: Path, **how: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        look(folder, **how)  # type: ignore[arg-type]
    assert {problem.field for problem in caught.value.problems} == {"model.path"}
    return [problem.rule for problem in caught.value.problems]


def rewrite(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("head", ["policy", "value"])
def test_weights_that_fit(tiny: str, head: str) -> None:
    look(Path(tiny), head=head)


@pytest.mark.parametrize("head", ["policy", "value"])
def test_another_hidden_size(copy: Path, head: str) -> None:
    rewrite(copy, hidden_size=48)
    [rule] = rules(copy, head=head)
    assert (
        "of its weights are of another shape, the first model.embed_tokens.weight: [17, 32], not [17, 48]"
        in rule
    )


def test_more_layers_than_there_are(copy: Path) -> None:
    rewrite(copy, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    assert rules(copy) == ["11 weights are not in its files, the first model.layers.2.input_layernorm.weight"]


def test_another_vocabulary(copy: Path) -> None:
    rewrite(copy, vocab_size=20)
    assert rules(copy) == [
        "1 of its weights are of another shape, the first model.embed_tokens.weight: [17, 32], not [20, 32]"
    ]


def test_a_value_model_needs_no_output_matrix(copy: Path) -> None:
    """config.json asks for an output matrix of its own, which no file has."""
    rewrite(copy, tie_word_embeddings=False)
    assert rules(copy) == ["1 weights are not in its files, the first lm_head.weight"]
    look(copy, head="value")


def test_a_value_head_of_two_classes(copy: Path) -> None:
    save_file(load_file(copy / SINGLE) | {"score.weight": torch.zeros(2, 32)}, copy / SINGLE)
    assert rules(copy, head="value") == ["its value head score.weight is [2, 32], not [1, 32]"]
    look(copy)


@pytest.mark.parametrize(
    "wrong",
    [{"hidden_size": -5}, {"pad_token_id": 1000}, {"num_key_value_heads": 0}, {"hidden_act": "nosuch"}],
)
def test_values_that_make_no_model(wrong: dict[str, Any], copy: Path) -> None:
    rewrite(copy, **wrong)
    [rule] = rules(copy)
    assert rule.startswith("no qwen3 model can be built from its configuration: ")


def test_a_rotary_factor_that_is_no_number(copy: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 2.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 16, "low_freq_factor": True}
    rewrite(copy, rope_parameters=rope)
    [rule] = rules(copy)
    assert rule.startswith("no qwen3 model can be built from its configuration: Subtraction")


def test_pickled_weights(copy: Path) -> None:
    weights = load_file(copy / SINGLE)
    (copy / SINGLE).unlink()
    torch.save(weights, copy / PICKLE)
    look(copy)
    torch.save({name: tensor for name, tensor in weights.items() if ".layers.1." not in name}, copy / PICKLE)
    assert rules(copy) == ["11 weights are not in its files, the first model.layers.1.input_layernorm.weight"]


def test_a_pickle_that_would_run_code(copy: Path) -> None:
    (copy / SINGLE).unlink()
    torch.save({"model.norm.weight": Bomb(copy / "exploded")}, copy / PICKLE)
    [rule] = rules(copy)
    assert (
        rule
        == "its weights hold more than tensors, which was not executed: Unsupported global: GLOBAL getattr"
    )
    assert not (copy / "exploded").exists()


@pytest.mark.parametrize("content", [torch.ones(2), [torch.ones(2)]])
def test_a_pickle_without_names(copy: Path, content: object) -> None:
    (copy / SINGLE).unlink()
    torch.save(content, copy / PICKLE)
    [rule] = rules(copy)
    assert rule.startswith("its weights cannot be read: pytorch_model.bin holds a ") and rule.endswith(
        ", not tensors by name"
    )


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_only_headers_are_read(tmp_path: Path) -> None:
    """A file of 64 GiB, all of it a hole: reading it would take minutes, and its tensors would fill the
    memory."""
    make_model(tmp_path, hidden=32, layers=1, heads=2, kv_heads=1)
    rows = 2**29
    header = json.dumps(
        {"model.embed_tokens.weight": {"dtype": "F32", "shape": [rows, 32], "data_offsets": [0, rows * 128]}}
    ).encode()
    with (tmp_path / SINGLE).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + rows * 128)
    shape, missing = rules(tmp_path)
    assert f"[{rows}, 32], not [17, 32]" in shape and missing.startswith("12 weights are not in its files")


def test_weights_that_are_loaded_in_ways_of_their_own_are_left_to_the_workers(copy: Path) -> None:
    rewrite(copy, hidden_size=48, quantization_config={"quant_method": "fp8"})
    look(copy)
    rewrite(copy, quantization_config=None, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    look(copy, trust=True)
    rules(copy)


@pytest.mark.parametrize("name", ["consolidated.safetensors", "adapter.bin"])
def test_files_of_other_names(copy: Path, name: str) -> None:
    (copy / SINGLE).rename(copy / name)
    assert "none of its weight files has a name" in rules(copy)[0] or "header" in rules(copy)[0]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        *((text, "names no files: it has no weight_map") for text in ("[]", "{}", '{"weight_map": ["a"]}')),
        ('{"weight_map": {"a": 3}}', "says that a is in 3, which is not a file of this directory"),
        *((text, "cannot be read: ") for text in ("[" * 100_000, "{")),
    ],
)
def test_an_index_of_another_form(copy: Path, text: str, fault: str) -> None:
    (copy / SINGLE).rename(copy / "model-00001-of-00001.safetensors")  # a single file goes before an index
    (copy / INDEX).write_text(text)
    assert rules(copy)[0].startswith(f"{copy / INDEX} {fault}")


@pytest.mark.parametrize(
    "entry",
    [
        *(
            "3",
            "[]",
            "[" * 100_000,
            '{"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}',
            '{"dtype": "F32", "shape": 1}',
        ),
        *(f'{{"dtype": "F32", "shape": [{size}], "data_offsets": [0, 4]}}' for size in (2**70, "true")),
    ],
)
def test_a_header_of_another_form(copy: Path, entry: str) -> None:
    header = ('{"a": ' + entry + "}").encode()
    (copy / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header)
    assert rules(copy) == ["model.safetensors has no safetensors header: it is broken"]


def test_a_folder_in_the_place_of_a_file(copy: Path) -> None:
    (copy / SINGLE).unlink()
    (copy / SINGLE).mkdir()
    assert rules(copy) == ["model.safetensors cannot be read: Is a directory"]
