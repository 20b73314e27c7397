"""Experts with rows of zeros: how many rows they get, their values and gradients, and which models have
them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import rank_jobs as jobs
from generation.test_native import VOCABULARY
from generation.test_steady import CONFIGS, made
from torch import Tensor
from transformers.integrations import moe

from hydraflow.engine.fsdp.build import FEW_SIZES
from hydraflow.models.experts import one_of_few, pad_experts


def test_few_numbers_of_rows_little_larger_than_those_asked_for() -> None:
    few = [one_of_few(rows) for rows in range(1, 4097)]
    assert all(rows <= found < rows * (1 + 1 / 16) for rows, found in enumerate(few, 1))
    assert len(set(few)) == 32 + 16 * 7, "16 between powers of two from 32 on"


def in_sevens(rows: int) -> int:
    """A number that the two experts of a token do not divide."""
    return -(-rows // 7) * 7


@pytest.mark.parametrize("name", CONFIGS)
def test_values_and_gradients_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    model, tokens = made(name), torch.randint(2, VOCABULARY, (3, 32), generator=draw)
    found: list[list[Tensor]] = []
    numbers: list[int] = []
    layers = model.config.num_hidden_layers
    inner = moe.grouped_mm_experts_forward

    def counted(module: Any, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        numbers.extend(filter(None, experts.flatten().bincount().tolist()))
        return inner(module, hidden, experts, weights)

    monkeypatch.setattr(moe, "grouped_mm_experts_forward", counted)
    for padded in (False, True):
        if padded:
            pad_experts(model, "of_this_test", in_sevens)
        logits = model(tokens).logits
        numbers, seen = [], numbers
        logits.square().mean().backward()
        found.append([logits, *(p.grad for p in model.parameters() if p.grad is not None)])
        model.zero_grad()
    assert [number % 7 for number in seen].count(0) >= len(seen) - layers > 0, "all but one in each layer"
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_experts_that_are_multiplied_in_another_way_stay() -> None:
    model = made("mixtral")
    experts: list[Any] = [part for part in model.modules() if hasattr(part, "_is_expert_parallel")]
    for part in experts:
        part.config = copy.deepcopy(part.config)
        part.config._experts_implementation = "eager"
    pad_experts(model, "of_this_test", in_sevens)
    assert {part.config._experts_implementation for part in experts} == {"eager"}


@pytest.mark.parametrize(("dtype", "name"), [("fp32", "grouped_mm"), ("bf16", FEW_SIZES)])
def test_only_products_that_are_compiled_need_few_numbers_of_rows(
    dtype: str, name: str, tmp_path: Path, one_rank: None
) -> None:
    made("mixtral").save_pretrained(tmp_path)
    engine = jobs.make_engine(str(tmp_path), {"fsdp": {"dtype": dtype}})
    experts = [part for part in engine.module.modules() if hasattr(part, "_is_expert_parallel")]
    assert {part.config._experts_implementation for part in experts} == {name}
