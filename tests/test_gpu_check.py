"""The checks of GPUs, on the CPU: that they run, and that they notice wrong numbers."""

from __future__ import annotations

import importlib.metadata
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "scripts"
IMPORTABLE = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPTS.parent), os.environ["PYTHONPATH"]])}
"""An environment in which scripts import the package without its installation."""


@pytest.mark.slow
def test_it_runs_and_says_what_is_right() -> None:
    run = ["bash", SCRIPTS / "gpu_check.sh", "--device", "cpu", "--size", "small"]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(run, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = [json.loads(line) for line in done.stdout.splitlines()]
    lines = {line["check"]: line for line in said}
    assert [*lines] == [
        "libraries",
        "device",
        "attention",
        "fused head",
        "numbers",
        "repeated",
        "links",
        "megatron",
        "step",
        "packing",
        "weights",
        "generation",
    ]
    assert all(line["right"] for line in said if "right" in line)
    assert [line["model"] for line in said if line["check"] == "megatron"] == ["qwen3", "qwen3_moe"]
    assert lines["links"]["bytes_per_second"] > 0
    assert lines["generation"]["tokens_per_second"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = runpy.run_path(str(SCRIPTS / "gpu_check.py"))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert check["main"]() == 2
    assert "finds no cuda device here" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    ("library", "found", "said"),
    [
        ("tensordict", None, "missing: tensordict"),
        ("torch", "2.11.0+cpu", "torch 2.11.0+cpu is older than hydraflow requires (2.13)"),
    ],
)
def test_what_is_missing_or_old_is_named(
    library: str,
    found: str | None,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        if name == library and found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found if name == library and found else known(name)

    known = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert runpy.run_path(str(SCRIPTS / "gpu_check.py"))["main"]() == 2
    assert said in capsys.readouterr().err.splitlines()


def test_wrong_numbers_are_noticed(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second engine, which is the device's, has other weights."""
    check = runpy.run_path(str(SCRIPTS / "gpu_check.py"))
    right, made = check["engine_of"], []

    def engine_of(*given: str) -> object:
        made.append(right(*given))
        if len(made) == 2:
            next(made[1].module.parameters()).data.mul_(1.1)
        return made[-1]

    monkeypatch.setitem(check["numbers"].__globals__, "engine_of", engine_of)
    assert not check["numbers"](torch.device("cpu"))
    assert len(made) == 2


def test_other_matrices_are_noticed(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are Megatron-Core's own here, so what the first engine loads is changed."""
    from hydraflow.engine import config

    check = runpy.run_path(str(SCRIPTS / "gpu_check.py"))
    assert check["matrices"](torch.device("cpu"))
    core, made = config.TRAIN_ENGINES["megatron"].load(), []

    def engine_of(*given: object, **how: object) -> object:
        made.append(core(*given, **how))
        if len(made) == 1:
            next(made[0]._trunk.parameters()).data.mul_(1.1)
        return made[-1]

    monkeypatch.setattr(type(config.TRAIN_ENGINES["megatron"]), "load", lambda entry: engine_of)
    assert not check["matrices"](torch.device("cpu"))
    assert len(made) == 2


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_a_wrong_fused_head_is_noticed(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """In the gradient of its matrix, the last thing compared."""
    from hydraflow.models import fused_head

    check = runpy.run_path(str(SCRIPTS / "gpu_check.py"))
    assert check["fused_head"](torch.device("cpu"), "small")
    right = fused_head.add_product
    monkeypatch.setattr(fused_head, "add_product", lambda *given: right(*given) * factor)
    assert not check["fused_head"](torch.device("cpu"), "small")


def test_wrong_attention_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from hydraflow.models import attention

    check = runpy.run_path(str(SCRIPTS / "gpu_check.py"))
    assert check["attention"](torch.device("cpu"))
    right = attention.attend_rows
    monkeypatch.setattr(
        attention,
        "attend_rows",
        lambda q, k, v, *how: right(q, k, v * (1 + (q.dtype == torch.bfloat16)), *how),
    )
    assert not check["attention"](torch.device("cpu"))


@pytest.mark.slow
def test_ranks_that_divide_a_model() -> None:
    """All collectives go through copies, as on one GPU."""
    names = ["ulysses, 2 ranks", "megatron, pipeline"]
    run = [sys.executable, SCRIPTS / "gpu_ranks.py", "--device", "cpu", "--at-once", "2", *names]
    done = subprocess.run(run, capture_output=True, text=True, timeout=240, env=IMPORTABLE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    said = {line["check"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert said.keys() == set(names)
    assert all(line["right"] and line["through_host"] for line in said.values())


@pytest.mark.parametrize("value", [1.1, float("nan")])
@pytest.mark.parametrize("wrong", ["scored", "norm", "weights", "error"])
def test_wrong_numbers_of_ranks_are_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: str, value: float
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_ranks

    def answer(rows: list[int], **changed: Any) -> dict[str, Any]:
        scored = {row: torch.ones(2) for row in rows}
        return {"scored": scored, "norm": 1.0, "weights": {"w": torch.ones(3)}, **changed}

    off = torch.tensor([1.0, value])
    changes = dict(scored={1: off}, norm=value, weights={"w": torch.tensor([1.0, 1.0, value])})

    def answers(layout: object, model: str, device: str, *, shared: bool) -> list[dict[str, Any]]:
        if said:
            return [answer([0]), answer([1])]
        if wrong == "error":
            raise RuntimeError("ranks [1] did not answer")
        return [answer([0]), answer([1], **{wrong: changes[wrong]})]

    said: list[bool] = []
    monkeypatch.setattr(gpu_ranks, "answers", answers)
    for _ in range(2):
        said.append(gpu_ranks.compare("fsdp", answer([0, 1]), "model", "cpu", shared=True))
    assert said == [False, True]
    assert ("did not answer" in capsys.readouterr().out) == (wrong == "error")
