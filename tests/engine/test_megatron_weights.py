"""Weights come out of the Megatron engine as they went in, bit by bit, from every layout to every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine import megatron_jobs as jobs
from engine.alike import assert_same, assert_sent
from engine.megatron_models import FAMILIES, SCORE, sizes, stored
from engine.pool import Ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    *((family, 1, sizes()) for family in FAMILIES),
    *((family, 2, sizes(2)) for family in FAMILIES),
    *((family, 2, sizes(1, 2)) for family in FAMILIES),
    *((family, 4, sizes(2, 2)) for family in FAMILIES),
    ("llama", 4, sizes(4)),
    ("llama", 4, sizes(1, 4)),
    ("qwen2", 4, sizes(2)),
    ("qwen2", 4, sizes(1, 2)),
    ("qwen2", 2, sizes()),
    ("qwen3", 4, sizes(2, 2, dtype="bf16")),
]
"""Family, ranks and settings."""


def label(value: Any) -> str | None:
    return " ".join(map(str, value.values())) if isinstance(value, dict) else None


@pytest.mark.parametrize(("family", "ranks", "settings"), LAYOUTS, ids=label)
def test_weights_are_those_of_the_files(
    pools: dict[int, Ranks], models: Path, family: str, ranks: int, settings: dict[str, Any]
) -> None:
    """On all ranks, or on the one that wants them."""
    path = str(models / family)
    dtype = torch.bfloat16 if settings.get("dtype") == "bf16" else torch.float32
    wanted = {name: tensor.to(dtype) for name, tensor in stored(path).items()}
    receivers = (None, *range(ranks))
    sent = pools[ranks].run(jobs.weights_to, path, {"megatron": settings, "optim": None}, receivers)
    assert_sent(sent, receivers, wanted)


@pytest.mark.parametrize(("ranks", "settings"), [(2, sizes(2)), (2, sizes(1, 2))], ids=label)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_is_saved(
    pools: dict[int, Ranks],
    models: Path,
    tmp_path: Path,
    family: str,
    ranks: int,
    settings: dict[str, Any],
) -> None:
    path, folder = str(models / family), tmp_path / "saved"
    # of a mistral model, transformers takes the tokenizer's files for Mistral's own
    options = {"megatron": settings, "model": {"tokenizer_path": str(models / "llama")}}
    assert pools[ranks].run(jobs.save_hf, path, options, str(folder)) == [1, 0]
    assert_same(load_file(folder / "model.safetensors"), stored(path))
    lm = AutoModelForCausalLM.from_pretrained(folder)
    assert type(lm) is type(AutoModelForCausalLM.from_pretrained(path))
    assert_same(dict(lm.named_parameters()), stored(path))
    assert (folder / "tokenizer.json").read_bytes() == (models / "llama" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(("ranks", "settings"), [(2, sizes(2)), (2, sizes(1, 2))], ids=label)
def test_a_value_model_is_saved_with_its_head(
    pools: dict[int, Ranks], models: Path, tmp_path: Path, ranks: int, settings: dict[str, Any]
) -> None:
    path, folder = str(models / "qwen2"), tmp_path / "saved"
    pools[ranks].run(jobs.save_hf, path, {"megatron": settings, "head": "value"}, str(folder))
    wanted = {**stored(path), SCORE: load_file(Path(path) / "model.safetensors")[SCORE]}
    assert_same(load_file(folder / "model.safetensors"), wanted)
    model = AutoModelForTokenClassification.from_pretrained(folder)
    torch.testing.assert_close(model.score.weight.detach(), wanted[SCORE], rtol=0, atol=0)
