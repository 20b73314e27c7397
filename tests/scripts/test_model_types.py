"""The list of model types: it has them all, nothing in it is to be mended, and a few are as it says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Cache

from hydraflow.generation import forward
from hydraflow.generation.widths import joint_cache
from scripts import model_types
from scripts.model_types import (
    BROKEN,
    PACKED,
    PADDED,
    PAGE,
    REFUSED,
    RIGHT,
    WRONG,
    as_policy,
    as_value_model,
    engine_of,
    line,
    loss_of,
    own_model,
    page,
    rows_of,
    sampled,
    tried,
    with_adapters,
)
from scripts.tiny_types import TYPES, save_tiny, tiny_config

LINES = PAGE.read_text().partition("|---|---|---|---|---|---|\n")[2].splitlines()
ROWS = {one.split("|")[1].strip(): one for one in LINES}
SOME = ["bart", "biogpt", "ctrl", "ernie4_5_moe", "exaone4", "gpt_neox_japanese", "granite_swa"]
SOME += ["granitemoe_swa", "inkling_text", "jetmoe", "lfm2", "mimo_v2_flash", "openai-gpt", "vaultgemma"]

WIDTHS = ["afmoe", "cohere2", "gemma2", "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "gpt2"]
WIDTHS += ["gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granite_swa", "olmo3", "vaultgemma"]


def test_the_page_is_what_the_script_writes_of_its_rows() -> None:
    (version,) = re.findall(r"with transformers (\S+):", PAGE.read_text())
    assert page(LINES, version) == PAGE.read_text()


def test_every_type_is_listed() -> None:
    assert set(TYPES) <= set(ROWS)
    assert [name for name in TYPES if WRONG in ROWS[name] or BROKEN in ROWS[name]] == []


@pytest.mark.parametrize("model_type", SOME)
def test_as_the_page_says(model_type: str, one_rank: None, tmp_path: Path) -> None:
    save_tiny(tiny_config(model_type), tmp_path)
    found = {"policy": tried(as_policy, tmp_path), "value": tried(as_value_model, tmp_path)}
    if found["policy"].word != REFUSED:
        found["lora"] = tried(with_adapters, tmp_path)
    assert line(model_type, found).split("|")[2:5] == ROWS[model_type].split("|")[2:5]


@pytest.mark.parametrize("way", [as_policy, as_value_model, with_adapters])
@pytest.mark.parametrize("part", ["down_proj", "embed_tokens"])
def test_wrong_numbers_are_noticed(
    part: str, way: Any, one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of an engine whose weights are not the model's."""

    def other(folder: Path) -> Any:
        lm = own_model(folder)
        next(one for name, one in lm.named_parameters() if part in name).data[5] += 0.5
        return lm

    save_tiny(tiny_config("qwen3"), tmp_path)
    assert way(tmp_path).word == PACKED
    monkeypatch.setattr(model_types, "own_model", other)
    assert way(tmp_path).word == WRONG


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of caches of the steps in which rows of several widths are decoded together."""
    found: list[int] = []

    def counted(caches: Sequence[Cache], *others: Any) -> Cache:
        found.append(len(caches))
        return joint_cache(caches, *others)

    monkeypatch.setattr(forward, "joint_cache", counted)
    return found


@pytest.mark.parametrize("model_type", WIDTHS)
def test_rows_of_several_widths_are_sampled_together(
    model_type: str, one_rank: None, tmp_path: Path, joined: list[int]
) -> None:
    """Their log-probabilities are transformers' own."""
    save_tiny(tiny_config(model_type), tmp_path)
    assert sampled(tmp_path).word == RIGHT
    assert joined and min(joined) > 1


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_rows_of_several_widths_whose_last_layers_share_keys(
    model_type: str, one_rank: None, tmp_path: Path, joined: list[int]
) -> None:
    sizes = tiny_config(model_type).to_diff_dict()
    sizes |= dict(num_hidden_layers=4, num_kv_shared_layers=2, intermediate_size=48)
    sizes |= dict(layer_types=["sliding_attention", "full_attention"] * 2)
    for of_each_layer in ("activation_sparsity_pattern", "per_layer_config"):
        sizes.pop(of_each_layer, None)
    save_tiny(AutoConfig.for_model(**sizes), tmp_path)
    assert sampled(tmp_path).word == RIGHT
    assert joined and min(joined) > 1


def test_no_layer_is_dropped(one_rank: None, tmp_path: Path) -> None:
    """Else the same rows would not give the same gradients twice."""
    config = tiny_config("biogpt")
    config.layerdrop = 0.5
    save_tiny(config, tmp_path)
    engine, found = engine_of(tmp_path), []
    for _ in range(2):
        engine.forward_backward([rows_of()], loss_of)
        found.append([p.grad.to_local().clone() for p in engine.module.parameters() if p.grad is not None])
        engine.module.zero_grad()
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_adapters_of_a_model_that_writes_into_its_embeddings(one_rank: None, tmp_path: Path) -> None:
    save_tiny(tiny_config("git"), tmp_path)
    assert with_adapters(tmp_path).word == PADDED


@pytest.mark.parametrize("head", ["policy", "value"])
@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "falcon_mamba"])
def test_a_residual_stream_in_float32_with_a_head_in_bf16(
    model_type: str, head: str, one_rank: None, tmp_path: Path
) -> None:
    save_tiny(tiny_config(model_type), tmp_path)
    engine, rows = engine_of(tmp_path, head=head, dtype="bf16"), rows_of()
    engine.forward([rows])
    engine.forward_backward([rows], loss_of)
    engine.optimizer_step()
    assert engine._padded
