"""Models with code of their own: the generation engine builds them by themselves, and what is written can be
loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIGURATION = """
from transformers import Qwen3Config

class OwnConfig(Qwen3Config):
    model_type = "own_test_qwen"
"""
MODELING = """
from transformers import Qwen3ForCausalLM
from .configuration_own import OwnConfig

class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
"""
AUTO_MAP = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
}
HEAD = """
import sys
from pathlib import Path
import torch
from hydraflow.errors import ConfigError
from hydraflow.models.config import ModelConfig
from hydraflow.models.loading import causal_class, empty_model, load_config, unfilled_model
model = ModelConfig(path=sys.argv[1], trust_remote_code=True)
config = load_config(model)
"""
BUILDS = """
print(type(unfilled_model(config, device="meta", dtype=torch.float32, trust=True)).__name__)
"""
WRITES = """
from hydraflow.engine.hf_files import hf_files_of, write_hugging_face
value = empty_model(config, model, head="value", dtype=torch.float32, attention="sdpa", chunk_tokens=64)
write_hugging_face(hf_files_of(value, model, weights=False), None, Path(sys.argv[2]), field="model")
written = ModelConfig(path=sys.argv[2], trust_remote_code=True)
print(causal_class(load_config(written), written).__name__)
"""
LACKS = """
try:
    causal_class(config, model)
except ConfigError as error:
    print(error)
"""


@pytest.fixture
def own(tiny: str, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(tiny, tmp_path / "own"))
    file = folder / "config.json"
    settings = json.loads(file.read_text()) | {"model_type": "own_test_qwen", "auto_map": AUTO_MAP}
    file.write_text(json.dumps(settings))
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "modeling_own.py").write_text(MODELING)
    return folder


def printed(program: str, tmp_path: Path, *arguments: object) -> str:
    """Of a process that has not loaded the model before."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    words = [sys.executable, "-c", HEAD + program, *map(str, arguments)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_process_that_loads_no_weights_builds_it(own: Path, tmp_path: Path) -> None:
    assert printed(BUILDS, tmp_path, own) == "OwnForCausalLM\n"


@pytest.mark.slow
def test_what_is_written_without_weights_can_be_loaded(own: Path, tmp_path: Path) -> None:
    assert printed(WRITES, tmp_path, own, tmp_path / "written") == "OwnForCausalLM\n"


@pytest.mark.slow
def test_code_that_cannot_be_loaded_is_named(own: Path, tmp_path: Path) -> None:
    (own / "modeling_own.py").unlink()
    assert "its own code cannot be loaded: " in printed(LACKS, tmp_path, own)
