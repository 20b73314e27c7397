"""A model that transformers knows only once `external_lib` is imported."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hydraflow.errors import ConfigError
from hydraflow.models.config import ModelConfig
from hydraflow.models.loading import load_config

LIBRARY = """
from transformers import AutoConfig, LlamaConfig

class MineConfig(LlamaConfig):
    model_type = "llama_of_mine"

AutoConfig.register("llama_of_mine", MineConfig)
"""


def test_an_architecture_that_a_module_registers(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "registers_llama.py").write_text(LIBRARY)
    facts = json.loads((Path(tiny) / "config.json").read_text()) | {"model_type": "llama_of_mine"}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match="cannot be read as a model"):
        load_config(ModelConfig(path=str(tmp_path)))
    found = load_config(ModelConfig(path=str(tmp_path), external_lib="registers_llama"))
    assert found.model_type == "llama_of_mine"
    del sys.modules["registers_llama"]
