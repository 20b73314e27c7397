"""The index of a model in several files names files of its directory, and no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from hydraflow.errors import ConfigError
from hydraflow.model_merger.safetensors_files import read_directory
from hydraflow.models.config import ModelConfig
from hydraflow.models.fit import require_weights
from hydraflow.models.weight_files import (
    INDEX,
    PICKLED_INDEX,
    files_to_load,
    read_weight_map,
    stored_tensor,
    weight_faults,
)

OUTSIDE = [
    "../secret.safetensors",
    "/etc/passwd",
    "a/../../secret.safetensors",
    "",
    ".",
    "a\0b",
    3,
    ["model.safetensors"],
    None,
]


def directory(tmp_path: Path, named: object, index: str = INDEX) -> Path:
    """A model's directory beside a file that is none of its own."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for file in (tmp_path / "secret.safetensors", folder / "shard.safetensors"):
        save_file({"w": torch.ones(2), "score.weight": torch.ones(1, 2)}, file)
    (folder / index).write_text(json.dumps({"weight_map": {"w": named, "score.weight": named}}))
    return folder


@pytest.mark.parametrize("named", OUTSIDE)
def test_files_elsewhere_are_refused_by_every_reader(tmp_path: Path, named: object) -> None:
    folder = directory(tmp_path, named)
    for reader in (
        lambda: read_directory(folder, field="--test_hf_dir"),
        lambda: stored_tensor(folder, "score.weight"),
        lambda: require_weights(
            ModelConfig(path=str(folder)), PreTrainedConfig(), head="value", field="critic.model"
        ),
    ):
        with pytest.raises(
            ConfigError, match="says that w is in .*, which is not a file of this directory"
        ) as caught:
            reader()
        assert str(folder / INDEX) in str(caught.value) and caught.value.exit_code == 2


def test_the_index_of_pickled_weights_is_looked_at_too(tmp_path: Path) -> None:
    folder = directory(tmp_path, "../pytorch_model.bin", PICKLED_INDEX)
    (folder / "shard.safetensors").unlink()  # it would be looked at instead
    with pytest.raises(ConfigError, match="not a file of this directory"):
        files_to_load(folder)


@pytest.mark.parametrize("named", ["shard.safetensors", "./shard.safetensors", "parts/shard.safetensors"])
def test_files_of_the_directory_are_read(tmp_path: Path, named: str) -> None:
    folder = directory(tmp_path, named)
    (folder / "parts").mkdir()
    (folder / "parts" / "shard.safetensors").symlink_to(tmp_path / "secret.safetensors")
    assert read_directory(folder, field="x").keys() == {"w", "score.weight"}
    found = stored_tensor(folder, "score.weight")
    assert found is not None and found.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"weight_map": [1]}', "[]", "{}", '{"weight_map": 3', "\xff"]
)
def test_other_content_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match="cannot be read|it has no weight_map"):
        read_weight_map(tmp_path / INDEX)


def saved(folder: Path, name: str, score: float) -> None:
    folder.mkdir(exist_ok=True)
    tensors = {"w": torch.ones(2), "score.weight": torch.full((1, 2), score)}
    if name.endswith(".bin"):
        torch.save(tensors, folder / name)
    else:
        save_file(tensors, folder / name)


def test_a_tensor_is_read_from_the_files_that_transformers_loads(tmp_path: Path) -> None:
    saved(tmp_path, "pytorch_model.bin", 1.0)
    found = stored_tensor(tmp_path, "score.weight")
    assert found is not None and found.tolist() == [[1.0, 1.0]]
    assert weight_faults(tmp_path) == []
    saved(tmp_path, "model.safetensors", 2.0)  # goes before pickles, and before an index of shards
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"score.weight": "gone.safetensors"}}))
    found = stored_tensor(tmp_path, "score.weight")
    assert found is not None and found.tolist() == [[2.0, 2.0]]
    assert weight_faults(tmp_path) == [] and stored_tensor(tmp_path, "lm_head.weight") is None


def test_a_missing_shard_of_pickled_weights_is_found(tmp_path: Path) -> None:
    saved(tmp_path, "pytorch_model-00001-of-00002.bin", 1.0)
    places = {"w": "pytorch_model-00001-of-00002.bin", "x": "pytorch_model-00002-of-00002.bin"}
    (tmp_path / PICKLED_INDEX).write_text(json.dumps({"weight_map": places}))
    assert weight_faults(tmp_path) == [
        "1 of 2 weight files are missing (pytorch_model-00002-of-00002.bin), with 1 of 2 weights"
    ]


def test_a_stale_file_beside_the_one_that_is_loaded_is_no_fault(tmp_path: Path) -> None:
    saved(tmp_path, "model.safetensors", 2.0)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"cut")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "model-00001-of-00002.safetensors"}}))
    assert weight_faults(tmp_path) == []
    assert read_directory(tmp_path, field="x").keys() == {"w", "score.weight"}
