"""The Megatron engine, divided in every way, gives the numbers, gradients and steps of the FSDP engine and of
transformers itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import hydraflow.engine.megatron  # noqa: F401  lets Megatron-Core run without CUDA, so it comes first

pytest.importorskip("megatron.core")

from engine import megatron_jobs as jobs
from engine import rank_jobs
from engine.megatron_models import FAMILIES, GROUPED, save_model, sizes
from engine.megatron_ways import TOLERANCE, Oracle, assert_near
from engine.pool import Ranks
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from hydraflow.metrics import merge, values
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto


@pytest.fixture(scope="module")
def oracle(models: Path) -> Oracle:
    return Oracle(models)


def assert_is_right(
    found: list[dict[str, Any]], oracle: dict[str, Any], settings: Mapping[str, Any], rows: int
) -> None:
    """All that ranks of these sizes said, counted, added up and became."""
    tensor, stages = settings["tensor_model_parallel_size"], settings["pipeline_model_parallel_size"]
    data = len(found) // tensor // stages
    assert [rank["place"] for rank in found] == [
        (rank // tensor % data, data, rank % tensor == 0 and rank // (tensor * data) == stages - 1)
        for rank in range(len(found))
    ]
    collected = [rank for rank in found if rank["place"][2]]
    for name, wanted in oracle["said"].items():
        said = torch.cat([rank["said"][name] for rank in collected])
        torch.testing.assert_close(said.double(), wanted, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(
            said.double(), oracle["fsdp"]["said"][name].double(), rtol=0, atol=TOLERANCE
        )
    for rank in found:
        [whole] = [one for one in collected if one["place"][0] == rank["place"][0]]
        main = "log_probs" if "log_probs" in whole["said"] else "values"
        assert torch.equal(rank["on_all_stages"], whole["said"][main])
    reported = values(merge(rank["reported"] for rank in collected))
    assert reported == pytest.approx(values(oracle["fsdp"]["reported"]), rel=TOLERANCE)
    assert reported["loss"] == pytest.approx(oracle["loss"], rel=TOLERANCE)
    gradient = jobs.assembled([rank["gradient"] for rank in found])
    assert_near(gradient, oracle["gradient"])
    fsdp = {name.removeprefix("lm."): g for name, g in oracle["fsdp"]["gradient"].items()}
    assert_near(gradient, {name: fsdp[name] for name in gradient})
    norm = float(torch.cat([g.flatten() for g in oracle["gradient"].values()]).norm())
    for rank in found:
        assert rank["steps"][0]["grad_norm"] == pytest.approx(norm, rel=TOLERANCE)
        assert rank["steps"] == [pytest.approx(step, rel=TOLERANCE) for step in oracle["fsdp"]["steps"]]
        assert_near(rank["weights"], oracle["fsdp"]["weights"])
        assert rank["counted"] == [rows, rows / data]


def check(
    pools: dict[int, Ranks],
    models: Path,
    oracle: Oracle,
    family: str,
    ranks: int,
    options: Mapping[str, Any],
    kind: str = "usual",
    micro_batches: int = 2,
) -> None:
    found = pools[ranks].run(jobs.numbers, str(models / family), options, kind, micro_batches)
    head = options.get("head", "policy")
    rows = len(jobs.make_rows(kind))
    assert_is_right(found, oracle(family, head, kind), options["megatron"], rows)


FORMS = {"tp 1": (1, sizes()), "tp 2": (2, sizes(2)), "pp 2": (2, sizes(1, 2)), "tp 2 pp 2": (4, sizes(2, 2))}
"""Ranks and settings."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["tp 1", "tp 2 pp 2"])
def test_every_family(pools: dict[int, Ranks], models: Path, oracle: Oracle, form: str, family: str) -> None:
    """Whole, and with every matrix and the layers divided; `LAYOUTS` has the one without the other."""
    ranks, settings = FORMS[form]
    check(pools, models, oracle, family, ranks, {"megatron": settings})


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
def test_every_layout(pools: dict[int, Ranks], models: Path, oracle: Oracle, layout: str) -> None:
    family, ranks, settings = LAYOUTS[layout]
    check(pools, models, oracle, family, ranks, {"megatron": settings})


@pytest.mark.parametrize("layout", ["tp 2", "pp 2", "tp 2 pp 2", "data 2", "tp 2, no sp", "pp 2, data 2"])
def test_values(pools: dict[int, Ranks], models: Path, oracle: Oracle, layout: str) -> None:
    """Of a model whose embedding is tied as long as it is a policy."""
    ranks, settings = FORMS[layout] if layout in FORMS else LAYOUTS[layout][1:]
    check(pools, models, oracle, "qwen2", ranks, {"megatron": settings, "head": "value"})


@pytest.mark.parametrize("kind", ["one token", "far apart", "samples"])
@pytest.mark.parametrize("form", ["tp 2", "pp 2"])
def test_every_kind_of_rows(
    pools: dict[int, Ranks], models: Path, oracle: Oracle, form: str, kind: str
) -> None:
    """Lines that the ranks do not divide, and prompts that rows share."""
    ranks, settings = FORMS[form]
    check(pools, models, oracle, "qwen3", ranks, {"megatron": settings}, kind, 1)


PADDED = {"use_remove_padding": False}


@pytest.mark.parametrize("kind", ["usual", "samples"])
@pytest.mark.parametrize("form", ["tp 1", "tp 2", "pp 2"])
def test_padded_rows(pools: dict[int, Ranks], models: Path, oracle: Oracle, form: str, kind: str) -> None:
    """As packed ones, also where these share prompts."""
    ranks, settings = FORMS[form]
    check(pools, models, oracle, "qwen3", ranks, {"megatron": settings, "model": PADDED}, kind)


def test_values_of_padded_rows(pools: dict[int, Ranks], models: Path, oracle: Oracle) -> None:
    options = {"megatron": sizes(2), "head": "value", "model": PADDED}
    check(pools, models, oracle, "qwen2", 2, options)


@pytest.mark.parametrize("form", ["tp 2", "pp 2"])
def test_no_checkpointing_of_activations(
    pools: dict[int, Ranks], models: Path, oracle: Oracle, form: str
) -> None:
    ranks, settings = FORMS[form]
    options = {"megatron": settings, "model": {"enable_gradient_checkpointing": False}}
    check(pools, models, oracle, "qwen3", ranks, options, micro_batches=4)


@pytest.mark.parametrize("form", ["tp 2", "pp 2"])
def test_parts_of_a_layer_that_are_recomputed_alone(
    pools: dict[int, Ranks], models: Path, oracle: Oracle, form: str
) -> None:
    ranks, settings = FORMS[form]
    overrides = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
    options = {"megatron": {**settings, "override_transformer_config": overrides}}
    check(pools, models, oracle, "qwen3", ranks, options)


def test_the_oracle_is_not_trivial(oracle: Oracle) -> None:
    """Every tensor has a gradient, gradients are clipped, and some tokens are the most probable, some not."""
    found = oracle("qwen2", "policy", "usual")
    assert min(float(g.abs().max()) for g in found["gradient"].values()) > 1e-4
    assert found["fsdp"]["steps"][0]["grad_norm"] > 2 * jobs.OPTIM["clip_grad"]
    assert 0 < float(found["said"]["greedy_match"].mean()) < 1


# --- the law of gradients

IN_ORDER, SHUFFLED = tuple(range(8)), (2, 4, 0, 7, 1, 3, 6, 5)
CUTS = [(IN_ORDER, 1), (IN_ORDER, 2), (IN_ORDER, 4), (SHUFFLED, 2), (SHUFFLED, 4)]
"""The order of the rows, which decides on the rank that has them, and the rows of each micro-batch."""


def batch(untrained: slice) -> DataProto:
    """Rows of which some have no trained token."""
    found = rank_jobs.make_batch()
    mask, lengths = ragged.parts(found.get("response_mask"))
    rows = ragged.rows(ragged.from_parts(mask.clone(), lengths))
    for row in rows[untrained]:
        row.zero_()
    columns: dict[str, Any] = dict(found.items())
    return DataProto.from_dict({**columns, "response_mask": ragged.from_rows(rows)})


@pytest.mark.parametrize("untrained", [slice(0, 1), slice(4, 8)], ids=["a row", "a rank"])
def test_gradient_is_the_same_however_it_was_computed(
    pools: dict[int, Ranks], models: Path, untrained: slice
) -> None:
    path, data = str(models / "qwen2"), batch(untrained)
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
    found = pools[ranks].run(jobs.break_one_rank, path, {"megatron": settings})
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
