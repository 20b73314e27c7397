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
FORKS = """
import os, sys, traceback
from pathlib import Path
import torch
from transformers import Qwen3ForCausalLM
from hydraflow.engine.hf_files import hf_files_of, write_hugging_face
from hydraflow.errors import ConfigError
from hydraflow.models.config import ModelConfig
from hydraflow.models.loading import causal_class, empty_model, load_config, unfilled_model
for folder in map(Path, sys.argv[1:]):
    if os.fork():
        os.wait()
        continue
    with open(folder / "printed", "w") as sys.stdout:
        try:
            model = ModelConfig(path=str(folder / folder.name), trust_remote_code=True)
            config = load_config(model)
            exec((folder / "program.py").read_text())
        except Exception:
            traceback.print_exc(file=sys.stdout)
    os._exit(0)  # to tidy up what was imported takes a second
"""
BUILDS = """
print(type(unfilled_model(config, device="meta", dtype=torch.float32, trust=True)).__name__)
"""
WRITES = """
value = empty_model(config, model, head="value", dtype=torch.float32, attention="sdpa", chunk_tokens=64)
write_hugging_face(hf_files_of(value, model, weights=False), None, folder / "written", field="model")
written = ModelConfig(path=str(folder / "written"), trust_remote_code=True)
print(causal_class(load_config(written), written).__name__)
"""
LACKS = """
try:
    causal_class(config, model)
except ConfigError as error:
    print(error)
"""


PROGRAMS = {"builds": BUILDS, "writes": WRITES, "lacks": LACKS}


@pytest.fixture(scope="module")
def printed(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By each program, with a model and in a process of its own, forked from one that has imported the
    libraries and loaded no model. The code of "lacks" cannot be loaded."""
    root = tmp_path_factory.mktemp("own")
    for name, program in PROGRAMS.items():
        model = Path(shutil.copytree(tiny, root / name / name))
        file = model / "config.json"
        settings = json.loads(file.read_text()) | {"model_type": "own_test_qwen", "auto_map": AUTO_MAP}
        file.write_text(json.dumps(settings))
        (model / "configuration_own.py").write_text(CONFIGURATION)
        if name != "lacks":
            (model / "modeling_own.py").write_text(MODELING)
        (root / name / "program.py").write_text(program)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_MODULES_CACHE": str(root / "modules")}
    words = [sys.executable, "-c", FORKS, *(str(root / name) for name in PROGRAMS)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: (root / name / "printed").read_text() for name in PROGRAMS}


@pytest.mark.slow
def test_a_process_that_loads_no_weights_builds_it(printed: dict[str, str]) -> None:
    assert printed["builds"] == "OwnForCausalLM\n"


@pytest.mark.slow
def test_what_is_written_without_weights_can_be_loaded(printed: dict[str, str]) -> None:
    assert printed["writes"] == "OwnForCausalLM\n"


@pytest.mark.slow
def test_code_that_cannot_be_loaded_is_named(printed: dict[str, str]) -> None:
    assert "its own code cannot be loaded: " in printed["lacks"]
