"""Models, checkpoints and comparisons that several tests of the merger use."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.pool import Ranks
from model_merger import rank_jobs as jobs
from once import made_once
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from hydraflow.model_merger.__main__ import main


@pytest.fixture(scope="session")
def models(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of small models: tied and untied embeddings, float32 and bfloat16, and a value model whose
    head is not zero."""
    folder = tmp_path_factory.mktemp("models")
    found = {"tied": tiny}
    for seed, (name, options) in enumerate(
        {
            "untied": {"tie_word_embeddings": False},
            "bf16": {"dtype": "bfloat16"},
            "value": {"num_labels": 1, "token_classification_bias": False},
            "value_bias": {"num_labels": 1},
        }.items()
    ):
        found[name] = str(folder / name)
        _variant(tiny, folder / name, seed, value="value" in name, **options)
    return found


@pytest.fixture(scope="session")
def made(models: dict[str, str], one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints from training engines of 1, 2 and 4 ranks, <ranks>-<case>, and with verl's files,
    verl-<case>."""
    return made_once(tmp_path_factory, "checkpoints", lambda folder: _save_all(models, folder))


def _save_all(models: dict[str, str], folder: Path) -> None:
    def cases(size: int) -> list[tuple[str, Any, str]]:
        return [
            (models[name], options, str(folder / f"{size}-{name}")) for name, options in jobs.SAVED.items()
        ]

    jobs.save_many(cases(1))
    jobs.save(models["tied"], jobs.TRAINED, str(folder / "1-lora"), steps=2)
    jobs.save_as_verl(models["tied"], str(folder / "verl-one"))
    jobs.save_plain(models["tied"], str(folder / "verl-plain"))
    for size in (2, 4):
        pool = Ranks(size)
        pool.run(jobs.save_many, cases(size))
        if size == 2:
            pool.run(jobs.save, models["tied"], jobs.TRAINED, str(folder / "2-lora"))
        else:
            pool.run(jobs.save, models["untied"], jobs.COPIES, str(folder / "4-copies"))
            verl = [
                (models[model], str(folder / f"verl-{case}"), options)
                for case, (model, options) in jobs.SAVED_AS_VERL.items()
            ]
            pool.run(jobs.save_many_as_verl, verl)
        pool.stop()


def _variant(source: str, target: Path, seed: int, *, value: bool, **options: Any) -> None:
    """The same shape with other settings and other numbers, norms and biases included."""
    shutil.copytree(source, target)
    (target / "model.safetensors").unlink()
    auto = AutoModelForTokenClassification if value else AutoModelForCausalLM
    config = {**json.loads((target / "config.json").read_text()), **options}
    (target / "config.json").write_text(json.dumps(config))
    model = auto.from_config(
        auto.from_pretrained(source).config.__class__(
            **{k: v for k, v in config.items() if k != "architectures"}
        )
    )
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter.data, dtype=torch.float32).to(
            getattr(torch, config["dtype"])
        )
    model.config.dtype = getattr(torch, config["dtype"])
    model.save_pretrained(target)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must end with exit code 2 and leave nothing at `target`; gives its message."""

    def run(*arguments: object, target: Path | None = None) -> str:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as error:
            code = error.code
        assert code == 2
        if target is not None:
            assert not list(target.parent.glob(f"{target.name}*"))
        return capsys.readouterr().err

    return run


@pytest.fixture(scope="session")
def split(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Checkpoints of two ranks made by `split`; each is made once."""
    folder = tmp_path_factory.mktemp("split")

    def make(layout: str, model: str = "tied") -> Path:
        target = folder / f"{layout}-{model}"
        if not target.exists():
            command = [
                "split",
                "--hf_dir",
                models[model],
                "--target_dir",
                str(target),
                "--world_size",
                "2",
                "--layout",
                layout,
            ]
            assert main([*command, *(["--is-value-model"] if model == "value" else [])]) == 0
        return target

    return make


@pytest.fixture
def broken(split: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a checkpoint, to be spoilt."""
    return lambda layout: Path(shutil.copytree(split(layout), tmp_path / "checkpoint"))
