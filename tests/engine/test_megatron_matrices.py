"""Transformer Engine's matrices: when they are taken, and that a model whose norms are parts of matrices, as
with theirs, has the numbers, gradients and weights of one whose norms are layers. They themselves need CUDA:
a stand-in has their names (`fused_jobs.py`)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import fused_jobs, megatron_models
from engine.megatron_jobs import assembled
from engine.megatron_models import LATENT, sizes
from engine.megatron_ways import assert_near
from engine.pool import Ranks
from megatron.core.extensions import transformer_engine as te
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import DeepseekV2Config

from hydraflow.engine.megatron import matrices as chosen
from hydraflow.engine.megatron.matrices import LOCAL, matrices

FAMILIES = {
    "qwen2": megatron_models.FAMILIES["qwen2"],
    "qwen2_moe": megatron_models.MIXTURES["qwen2_moe"],
    "deepseek_v2": DeepseekV2Config(**LATENT | dict(num_experts_per_tok=3), q_lora_rank=None),
}
"""With biases; with norms before experts, and with one before latent attention, which stay layers."""
GROUP_SIZES = (2,)
LAYOUTS = [("qwen2", sizes(2)), ("qwen2", sizes(1, 2)), ("qwen2_moe", sizes(2)), ("deepseek_v2", sizes(2))]


@pytest.mark.parametrize(("family", "settings"), LAYOUTS)
def test_norms_in_matrices_are_norms(
    ranks: Ranks, models: Path, family: str, settings: dict[str, Any]
) -> None:
    given = str(models / family), {"megatron": settings}
    apart, fused = (ranks.run(partial(fused_jobs.numbers, fused=fused), *given) for fused in (False, True))
    for mine, wanted in zip(fused, apart, strict=True):
        assert mine["normed"] and not wanted["normed"]
        assert mine["said"].keys() == wanted["said"].keys()
        assert all(torch.equal(mine["said"][name], said) for name, said in wanted["said"].items())
        assert mine["steps"] == [pytest.approx(step, rel=1e-6) for step in wanted["steps"]]
        assert_near(mine["weights"], wanted["weights"])
    found, gradient = (assembled([rank["gradient"] for rank in each]) for each in (fused, apart))
    assert found.keys() == gradient.keys()
    assert all(torch.equal(found[name], wanted) for name, wanted in gradient.items())


def given(**options: Any) -> TransformerConfig:
    sizes = dict(num_layers=1, hidden_size=8, num_attention_heads=1, params_dtype=torch.bfloat16)
    return TransformerConfig(**sizes | options)


def test_they_are_taken_in_bfloat16_where_they_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert matrices(given()) is LOCAL, "there is no CUDA"
    monkeypatch.setattr(chosen, "gpu_count", lambda: 1)
    assert matrices(given()) is LOCAL, "it is not installed"
    monkeypatch.setattr(te, "HAVE_TE", True)
    found = matrices(given())
    assert found.after_norm is te.TELayerNormColumnParallelLinear
    assert (found.column, found.row) == (te.TEColumnParallelLinear, te.TERowParallelLinear)
    assert matrices(given(params_dtype=torch.float32)) is LOCAL
    assert matrices(given(transformer_impl="local")) is LOCAL
