"""One process of a node at a time resolves a model that has to be fetched or has code of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from hydraflow.errors import EnvironmentFault
from hydraflow.models import once
from hydraflow.models.config import ModelSourceConfig
from hydraflow.models.once import lock_file, resolving

ROOT = Path(__file__).parents[2]
CODE = """
from transformers import PretrainedConfig

class OwnConfig(PretrainedConfig):
    model_type = "own_test_model"
    def __init__(self, width=3, **kwargs):
        super().__init__(**kwargs)
        self.width = width
"""
LOAD = """
import os, sys
from transformers import AutoConfig
from hydraflow.models.config import ModelSourceConfig
from hydraflow.models.loading import load_config
loads = []
while len(loads) < 3 and (pid := os.fork()):
    loads.append(pid)
if len(loads) == 3:
    sys.exit(any(os.waitpid(pid, 0)[1] for pid in loads))
print(load_config(ModelSourceConfig(path=sys.argv[1], trust_remote_code=True)).width, flush=True)
os._exit(0)  # to tidy up what was imported takes each a second
"""
"""Three processes, forked from one that has imported the libraries."""


def _work(path: str, file: str) -> None:
    with resolving(path, ModelSourceConfig(path=path)):
        with open(file, "a") as log:
            log.write("in\n")
        time.sleep(0.2)
        with open(file, "a") as log:
            log.write("out\n")


def test_processes_resolve_one_after_the_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    name, file = f"nobody/no-model-{os.getpid()}", tmp_path / "order"
    workers = [context.Process(target=_work, args=(name, str(file))) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert file.read_text().split() == ["in", "out"] * 3
    lock_file(name).unlink()


def test_a_folder_without_code_needs_no_lock(tmp_path: Path) -> None:
    with resolving(str(tmp_path), ModelSourceConfig(path=str(tmp_path))):
        assert not lock_file(str(tmp_path)).exists()


def test_waiting_has_a_limit_that_names_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "SECONDS", 0.2)
    name = f"nobody/held-{os.getpid()}"
    lock_file(name).parent.mkdir(parents=True, exist_ok=True)
    refused = pytest.raises(EnvironmentFault, match=f"waited 0.2 s for .* that fetches {name}")
    with FileLock(lock_file(name)), refused, resolving(name, ModelSourceConfig(path=name)):
        pass
    lock_file(name).unlink()


@pytest.mark.slow
def test_three_processes_load_a_model_with_its_own_code_at_the_same_time(tmp_path: Path) -> None:
    model = tmp_path / "own"
    model.mkdir()
    (model / "configuration_own.py").write_text(CODE)
    (model / "config.json").write_text(
        json.dumps(
            {
                "model_type": "own_test_model",
                "width": 7,
                "auto_map": {"AutoConfig": "configuration_own.OwnConfig"},
            }
        )
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    words = [sys.executable, "-c", LOAD, str(model)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "7\n" * 3), done.stderr
