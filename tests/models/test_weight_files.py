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
from hydraflow.models.loading import stored_tensor
from hydraflow.models.weight_files import INDEX, PICKLED_INDEX, files_to_load, read_weight_map

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
    for file in (tmp_path / "secret.safetensors", folder / "model.safetensors"):
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
    (folder / "model.safetensors").unlink()  # it would be taken instead
    with pytest.raises(ConfigError, match="not a file of this directory"):
        files_to_load(folder)


@pytest.mark.parametrize("named", ["model.safetensors", "./model.safetensors", "parts/model.safetensors"])
def test_files_of_the_directory_are_read(tmp_path: Path, named: str) -> None:
    folder = directory(tmp_path, named)
    (folder / "parts").mkdir()
    (folder / "parts" / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")
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
