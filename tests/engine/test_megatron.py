"""The Megatron engine, divided in every way, gives the numbers, gradients and steps of the FSDP engine and of
transformers itself."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import megatron_jobs as jobs
from engine import rank_jobs
from engine.megatron_models import FAMILIES, GROUPED, save_model, sizes
from engine.megatron_ways import Oracle, assert_near, check
from engine.pool import Ranks
from transformers import LlamaConfig, MistralConfig, Qwen2Config

FORMS = {"tp 1": (1, sizes()), "tp 2": (2, sizes(2)), "pp 2": (2, sizes(1, 2)), "tp 2 pp 2": (4, sizes(2, 2))}
"""Ranks and settings."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["tp 1", "tp 2 pp 2"])
def test_every_family(pools: dict[int, Ranks], oracle: Oracle, form: str, family: str) -> None:
    """Whole, and with every matrix and the layers divided; `LAYOUTS` has the one without the other."""
    ranks, settings = FORMS[form]
    check(pools[ranks], oracle, family, settings)


PLAIN = {"use_distributed_optimizer": False}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "alone, plain optimizer": ("qwen3", 1, sizes(**PLAIN)),
    "data 2": ("qwen3", 2, sizes()),
    "data 2, plain optimizer": ("qwen3", 2, sizes(**PLAIN)),
    "tp 2, no sp": ("qwen3", 2, sizes(2, sequence_parallel=False)),
    "tp 2, plain optimizer": ("qwen2", 2, sizes(2, **PLAIN)),
    "pp 2, plain optimizer": ("qwen2", 2, sizes(1, 2, **PLAIN)),
    "data 4": ("qwen2", 4, sizes()),
    "tp 2, data 2": ("qwen3", 4, sizes(2)),
    "tp 2, data 2, no sp, plain optimizer": ("qwen2", 4, sizes(2, sequence_parallel=False, **PLAIN)),
    "tp 2, pp 2, no sp": ("qwen3", 4, sizes(2, 2, sequence_parallel=False)),
    "tp 4": ("llama", 4, sizes(4)),
    "pp 2, data 2": ("qwen2", 4, sizes(1, 2)),
    "pp 4": ("llama", 4, sizes(1, 4)),
    "data 2, buffers": (
        "qwen3",
        2,
        sizes(
            override_ddp_config={
                "pad_buckets_for_high_nccl_busbw": True,
                "reduce_scatter_with_fp32_accumulation": True,
            }
        ),
    ),
    "pp 2, one layer first": (
        "llama",
        2,
        sizes(1, 2, override_transformer_config={"num_layers_in_first_pipeline_stage": 1}),
    ),
    "pp 2, a layout": (
        "llama",
        2,
        sizes(1, 2, override_transformer_config={"pipeline_model_parallel_layout": "Et|t*3L"}),
    ),
    "chunks": ("qwen2", 2, sizes(2, head_chunk_tokens=2)),
}
"""Family, ranks and settings."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(pools: dict[int, Ranks], oracle: Oracle, layout: str) -> None:
    family, ranks, settings = LAYOUTS[layout]
    check(pools[ranks], oracle, family, settings)


@pytest.mark.parametrize("layout", ["tp 2", "pp 2", "tp 2 pp 2", "data 2", "tp 2, no sp", "pp 2, data 2"])
def test_values(pools: dict[int, Ranks], oracle: Oracle, layout: str) -> None:
    """Of a model whose embedding is tied as long as it is a policy."""
    ranks, settings = FORMS[layout] if layout in FORMS else LAYOUTS[layout][1:]
    check(pools[ranks], oracle, "qwen2", settings, head="value")


@pytest.mark.parametrize("kind", ["one token", "far apart", "samples"])
@pytest.mark.parametrize("form", ["tp 2", "pp 2"])
def test_every_kind_of_rows(pools: dict[int, Ranks], oracle: Oracle, form: str, kind: str) -> None:
    """Lines that the ranks do not divide, and prompts that rows share."""
    ranks, settings = FORMS[form]
    check(pools[ranks], oracle, "qwen3", settings, kind=kind, micro_batches=1)


PADDED = {"use_remove_padding": False}


@pytest.mark.parametrize("kind", ["usual", "samples"])
@pytest.mark.parametrize("form", ["tp 1", "tp 2", "pp 2"])
def test_padded_rows(pools: dict[int, Ranks], oracle: Oracle, form: str, kind: str) -> None:
    """As packed ones, also where these share prompts."""
    ranks, settings = FORMS[form]
    check(pools[ranks], oracle, "qwen3", settings, kind=kind, model=PADDED)


def test_values_of_padded_rows(pools: dict[int, Ranks], oracle: Oracle) -> None:
    check(pools[2], oracle, "qwen2", sizes(2), head="value", model=PADDED)


@pytest.mark.parametrize("form", ["tp 2", "pp 2"])
def test_no_checkpointing_of_activations(pools: dict[int, Ranks], oracle: Oracle, form: str) -> None:
    ranks, settings = FORMS[form]
    off = {"enable_gradient_checkpointing": False}
    check(pools[ranks], oracle, "qwen3", settings, model=off, micro_batches=4)


@pytest.mark.parametrize("form", ["tp 2", "pp 2"])
def test_parts_of_a_layer_that_are_recomputed_alone(
    pools: dict[int, Ranks], oracle: Oracle, form: str
) -> None:
    ranks, settings = FORMS[form]
    overrides = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
    check(pools[ranks], oracle, "qwen3", {**settings, "override_transformer_config": overrides})


def test_the_oracle_is_not_trivial(oracle: Oracle) -> None:
    """Every tensor has a gradient, gradients are clipped, and some tokens are the most probable, some not."""
    found = oracle("qwen2")
    assert min(float(g.abs().max()) for g in found["gradient"].values()) > 1e-4
    assert found["fsdp"]["steps"][0]["grad_norm"] > 2 * jobs.OPTIM["clip_grad"]
    assert 0 < float(found["said"]["greedy_match"].mean()) < 1


# --- the law of gradients

IN_ORDER, SHUFFLED = tuple(range(8)), (2, 4, 0, 7, 1, 3, 6, 5)
CUTS = [(IN_ORDER, 1), (IN_ORDER, 2), (IN_ORDER, 4), (SHUFFLED, 2), (SHUFFLED, 4)]
"""The order of the rows, which decides on the rank that has them, and the rows of each micro-batch."""


@pytest.mark.parametrize("untrained", [slice(0, 1), slice(4, 8)], ids=["a row", "a rank"])
def test_gradient_is_the_same_however_it_was_computed(
    pools: dict[int, Ranks], models: Path, untrained: slice
) -> None:
    path, data = str(models / "qwen2"), rank_jobs.untrained(rank_jobs.make_batch(), untrained)
    layouts = [(1, sizes()), (2, sizes()), (2, sizes(**PLAIN)), (4, sizes(2)), (4, sizes(1, 2))]
    wanted: dict[str, torch.Tensor] = {}
    for ranks, settings in layouts:
        found = pools[ranks].run(jobs.cut_gradients, path, {"megatron": settings}, data, CUTS)
        for number in range(len(CUTS)):
            gradient = jobs.assembled([of_rank[number] for of_rank in found])
            wanted = wanted or gradient
            assert_near(gradient, wanted)
    assert min(float(g.abs().max()) for g in wanted.values()) > 1e-4


@pytest.mark.parametrize("layout", ["data 2", "data 2, plain optimizer", "tp 2, no sp", "pp 2, data 2"])
def test_an_infinite_loss_of_one_rank_skips_the_step_on_all(
    pools: dict[int, Ranks], models: Path, layout: str
) -> None:
    _, ranks, settings = LAYOUTS[layout]
    path = str(models / "qwen2")
    break_one_rank = partial(rank_jobs.break_one_rank, make=jobs.make_engine)
    found = pools[ranks].run(break_one_rank, path, {"megatron": settings})
    norms = {after["grad_norm"] for _, _, after in found}
    for reported, moved, after in found:
        assert reported["skipped"] == 1.0 and not moved
        assert after["skipped"] == 0.0
    assert len(norms) == 1


# --- models that are not built

REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "heads": (FAMILIES["qwen2"], sizes(4), "the 4 attention heads and the 2 key-value heads"),
    "layers": (LlamaConfig(**GROUPED), sizes(1, 4), "must divide the 2 layers of the model"),
    "windows": (
        MistralConfig(**GROUPED, sliding_window=4),
        sizes(),
        "does not support sliding-window attention",
    ),
    "some windows": (
        Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=4, max_window_layers=1),
        sizes(),
        "does not support sliding-window attention",
    ),
    "biases": (
        LlamaConfig(**GROUPED, attention_bias=True),
        sizes(),
        "does not support biases in a llama model",
    ),
    "activation": (
        LlamaConfig(**GROUPED, hidden_act="gelu"),
        sizes(),
        "does not support the activation gelu",
    ),
    "frequencies": (
        LlamaConfig(**GROUPED, rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0)),
        sizes(),
        "does not support rotary embeddings of type yarn",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_models_that_would_be_computed_differently_are_refused(
    pools: dict[int, Ranks], tmp_path: Path, why: str
) -> None:
    config, settings, words = REFUSED[why]
    save_model(config, tmp_path)
    for reported in pools[4].run(jobs.refusal, str(tmp_path), {"megatron": settings}):
        assert words in reported
