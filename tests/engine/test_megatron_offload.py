"""Weights, gradients and optimizer state of the Megatron engine that rest in host memory: nothing that is
learned changes by a bit, and what rests takes no memory of the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine import megatron_jobs as jobs
from engine.megatron_apart import OFFLOADS, same
from engine.megatron_models import GROUPED, save_model, sizes
from engine.pool import Ranks
from transformers import MixtralConfig, Qwen2Config

from hydraflow.batch_plan.layout import Devices, Layout
from hydraflow.engine.config import MegatronConfig
from hydraflow.memory.megatron import MegatronModelMemory
from hydraflow.memory.shape import read_shape
from hydraflow.models.config import ModelConfig

FAMILIES = {
    "qwen2": Qwen2Config(**GROUPED | dict(num_hidden_layers=4), tie_word_embeddings=True),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
}
GROUP_SIZES = (2,)
EVERYTHING = dict.fromkeys(OFFLOADS, True)
PLAIN = {"use_distributed_optimizer": False}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "data 2": ("qwen2", sizes()),
    "data 2, plain optimizer": ("qwen2", sizes(**PLAIN)),
    "tp 2, bf16": ("qwen2", sizes(2, dtype="bf16")),
    "data 2, bf16, plain optimizer": ("qwen2", sizes(dtype="bf16", **PLAIN)),
    "pp 2, two parts": ("qwen2", sizes(1, 2, virtual_pipeline_model_parallel_size=2)),
    "ep 2": ("mixtral", sizes(expert_model_parallel_size=2)),
}
"""Family and settings."""


def trained(ranks: Ranks, models: Path, layout: str, folder: Path, **keys: bool) -> list[dict[str, Any]]:
    family, settings = LAYOUTS[layout]
    options = {"megatron": {**settings, **keys}}
    return ranks.run(jobs.rest, str(models / family), options, str(folder))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_the_same_bit_by_bit(ranks: Ranks, models: Path, tmp_path: Path, layout: str) -> None:
    """Answers, norms, weights and moments, and the whole models that are saved."""
    plain = trained(ranks, models, layout, tmp_path / "plain")
    moved = trained(ranks, models, layout, tmp_path / "moved", **EVERYTHING)
    for found, wanted in zip(moved, plain, strict=True):
        wanted_held, found_held = wanted.pop("held"), found.pop("held")
        assert same(found, wanted)
        weights, gradients, _ = wanted_held["idle"]
        state = wanted_held["step"][2]
        assert wanted_held["rest"] == (weights, gradients, state) and min(weights, gradients, state) > 0
        assert found_held["idle"] == found_held["rest"] == found_held["sent"] == (0, 0, 0)
        assert found_held.get("update", (weights, gradients, 0)) == (weights, gradients, 0)
        assert found_held["step"] == (weights, gradients, state)
    files = list((tmp_path / "plain").rglob("*.safetensors"))
    assert len(files) == 2
    for file in files:
        assert (tmp_path / "moved" / file.relative_to(tmp_path / "plain")).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(("number", "key"), enumerate(OFFLOADS))
def test_each_key_moves_its_own(ranks: Ranks, models: Path, tmp_path: Path, number: int, key: str) -> None:
    for rank in trained(ranks, models, "data 2", tmp_path, **{key: True}):
        assert [size == 0 for size in rank["held"]["rest"]] == [name == key for name in OFFLOADS]


def test_a_reference_rests_too(ranks: Ranks, models: Path) -> None:
    (said, held), (moved, nothing) = (
        ranks.run(
            jobs.rest_frozen, str(models / "qwen2"), {"megatron": {**sizes(2), "param_offload": rests}}
        )[0]
        for rests in (False, True)
    )
    assert torch.equal(said, moved) and held > 0 == nothing


WIDE = dict(vocab_size=2000, hidden_size=256, intermediate_size=512, num_hidden_layers=2)
WIDE |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
MEASURED: dict[str, tuple[Any, dict[str, Any]]] = {
    "optimizer state divided": (Qwen2Config(**WIDE, tie_word_embeddings=True), sizes()),
    "bf16, whole state": (Qwen2Config(**WIDE, tie_word_embeddings=False), sizes(dtype="bf16", **PLAIN)),
    "bf16, tp 2": (Qwen2Config(**WIDE, tie_word_embeddings=True), sizes(2, dtype="bf16")),
    "experts divided": (MixtralConfig(**WIDE, num_local_experts=4), sizes(expert_model_parallel_size=2)),
}


@pytest.mark.parametrize("layout", MEASURED)
def test_the_estimate_counts_what_is_held(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    """At rest, in an update and in the optimizer's step, with each key and without, on the fuller rank."""
    config, settings = MEASURED[layout]
    save_model(config, tmp_path / "model")
    shape = read_shape(ModelConfig(path=str(tmp_path / "model")))
    assert shape is not None
    for keys in ({}, EVERYTHING):
        megatron = MegatronConfig(**{"dtype": "fp32", **settings, **keys})
        layout_of = Layout(
            "actor",
            "megatron",
            Devices.of([range(2)]),
            2,
            tensor=megatron.tensor_model_parallel_size,
            expert=megatron.expert_model_parallel_size,
            expert_tensor=megatron.expert_tensor_size,
        )
        number = 2 if megatron.dtype == "bf16" else 4
        memory = MegatronModelMemory(shape, layout_of, megatron, number, True, True, True, False)
        options = {"megatron": {**settings, **keys}}
        found = ranks.run(jobs.rest_held, str(tmp_path / "model"), options)
        held = {name: tuple(map(max, *(one[name] for one in found))) for name in found[0]}
        for name, parts in (("rest", memory.resting), ("update", memory.held)):
            assert held[name] == pytest.approx((parts.weights, parts.gradients, parts.optimizer), rel=0.01)
        state = memory.held.optimizer or memory.held.host
        assert held["step"] == pytest.approx((memory.held.weights, memory.held.gradients, state), rel=0.01)
