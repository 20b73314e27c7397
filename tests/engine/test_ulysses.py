"""Ulysses sequence parallelism: ranks that share the tokens of their rows give the numbers and gradients of
one rank that has them alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine import oom_jobs, ulysses_jobs
from engine import rank_jobs as jobs
from engine.alike import assert_same
from engine.pool import Ranks
from engine.test_parity import GROUPED, PADDED, SIZES, saved

from hydraflow.batch_plan.parts import MicroPlan
from hydraflow.engine.config import WrapPolicyConfig
from hydraflow.memory.activations import RowSizes, layer_costs, tokens_of
from hydraflow.memory.shape import shape_of
from hydraflow.metrics import merge, values

DOUBLE = {"model_dtype": "fp64", "dtype": "fp64"}
RANKS = 4
GROUP_SIZES = (4,)
KEY = "ulysses_sequence_parallel_size"
LATENT = dict(q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
LATENT |= dict(num_key_value_heads=4, first_k_dense_replace=2)
MODELS = {
    "one head of keys": transformers.Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=8),
    "two heads of keys": transformers.Qwen2Config(**SIZES, num_key_value_heads=2),
    "four heads of keys": transformers.LlamaConfig(**SIZES, num_key_value_heads=4),
    "windows": transformers.MistralConfig(**GROUPED, sliding_window=4),
    "latent": transformers.DeepseekV3Config(**SIZES, **LATENT),
}
"""Heads of keys that ranks have alone, share, or repeat; values narrower than keys."""
ALONE: dict[str, dict[str, Any]] = {}
"""What one rank alone found, by model, rows and options."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all models."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        saved(config, folder / name)
    return folder


def shared(size: int, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The options with that many ranks for each row, in float64 unless they say otherwise."""
    options = options or {}
    return {**options, "fsdp": {**DOUBLE, **options.get("fsdp", {}), KEY: size}}


def assert_is_that_of_one_rank(
    ranks: Ranks, path: Path | str, size: int, options: Mapping[str, Any], kind: str, micro_batches: int
) -> None:
    """What all ranks say, count and add up to is what one rank alone finds."""
    one_copy = {**options, "fsdp": {**options.get("fsdp", {}), "fsdp_size": -1}}
    key = f"{path} {kind} {one_copy}"
    if key not in ALONE:
        ALONE[key] = ulysses_jobs.numbers(str(path), shared(1, one_copy), kind, 1)
    alone = ALONE[key]
    assert max(float(value.abs().max()) for value in alone["gradient"].values()) > 1e-3
    found = ranks.run(ulysses_jobs.numbers, str(path), shared(size, options), kind, micro_batches)
    assert [rank["place"] for rank in found] == [
        (number // size, RANKS // size, number % size == 0) for number in range(RANKS)
    ]
    for number, rank in enumerate(found):
        assert_same(rank["gradient"], alone["gradient"], 1e-12)
        assert_same(rank["said"], found[number - number % size]["said"], 0.0)
        assert rank["counted"] == [
            len(ulysses_jobs.LENGTHS[kind]),
            len(ulysses_jobs.LENGTHS[kind]) * size / 4,
        ]
    collected = [rank for rank in found if rank["place"][2]]
    for name, wanted in alone["said"].items():
        said = torch.cat([rank["said"][name] for rank in collected])
        torch.testing.assert_close(said, wanted, rtol=0, atol=1e-12)
    reported = values(merge(rank["reported"] for rank in collected))
    assert reported == pytest.approx(values(alone["reported"]), rel=1e-12)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_every_kind_of_attention(ranks: Ranks, models: Path, model: str, size: int) -> None:
    assert_is_that_of_one_rank(ranks, models / model, size, {}, "usual", 1)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", [kind for kind in ulysses_jobs.LENGTHS if kind != "usual"])
def test_every_kind_of_rows(ranks: Ranks, models: Path, kind: str, size: int) -> None:
    """Lines that the ranks do not divide, slices without a token, prompts that rows share. The usual ones:
    `test_every_kind_of_attention`."""
    path = models / "one head of keys"
    assert_is_that_of_one_rank(ranks, path, size, {}, kind, 1)


def test_heads_of_keys_and_ranks_that_do_not_divide_each_other(ranks: Ranks, tmp_path: Path) -> None:
    heads = SIZES | dict(num_attention_heads=6, num_key_value_heads=3, hidden_size=24)
    saved(transformers.LlamaConfig(**heads), tmp_path)
    assert_is_that_of_one_rank(ranks, tmp_path, 2, {}, "usual", 2)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "value": (4, {"head": "value"}),
    "adapters": (2, {"model": {"lora_rank": 2}}),
    "adapters everywhere": (4, {"model": {"lora_rank": 2, "target_modules": "all-linear"}}),
    "no checkpointing": (2, {"model": {"enable_gradient_checkpointing": False}}),
    "chunks": (4, {"fsdp": {"head_chunk_tokens": 2}}),
    "kept gathered": (2, {"fsdp": {"reshard_after_forward": False}}),
    "one unit": (2, {"fsdp": {"wrap_policy": WrapPolicyConfig(min_num_params=10**6)}}),
    "two copies": (2, {"fsdp": {"fsdp_size": 2}}),
    "four copies": (4, {"fsdp": {"fsdp_size": 1}}),
    "offload policy": (2, {"fsdp": {"offload_policy": True}}),
}
"""Ranks for each row, and the options."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(ranks: Ranks, models: Path, layout: str) -> None:
    size, options = LAYOUTS[layout]
    assert_is_that_of_one_rank(ranks, models / "two heads of keys", size, options, "usual", 2)


@pytest.mark.parametrize(
    ("size", "options"),
    [(4, {"fsdp": {"param_offload": True}}), (2, {"fsdp": {"fsdp_size": 2}, "head": "value"})],
)
def test_training_is_that_of_one_rank(ranks: Ranks, models: Path, size: int, options: dict[str, Any]) -> None:
    """Weights, gradient norms and outputs of two steps with two micro-batches each."""
    path = str(models / "two heads of keys")
    alone = jobs.train(path, shared(1, {**options, "fsdp": {}}))
    found = ranks.run(jobs.train, path, shared(size, options), size)
    for rank in found:
        assert rank["reported"] == [pytest.approx(reported, rel=1e-12) for reported in alone["reported"]]
        assert_same(rank["weights"], alone["weights"], 1e-12)
        assert_same(rank["weights"], found[0]["weights"], 0.0)
    for step, wanted in enumerate(alone["seen"]):
        seen = torch.cat([rank["seen"][step] for rank in found[::size]])
        torch.testing.assert_close(seen, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("model", "dtype"), [("two heads of keys", "fp32"), ("two heads of keys", "bf16"), ("experts", "fp32")]
)
def test_other_precisions_are_within_rounding(
    ranks: Ranks, models: Path, tmp_path: Path, model: str, dtype: str
) -> None:
    if model == "experts":
        saved(transformers.MixtralConfig(**GROUPED, num_local_experts=4), tmp_path)
    path = str(tmp_path if model == "experts" else models / model)
    options = {"fsdp": {"model_dtype": "fp32", "dtype": dtype}}
    plain = ranks.run(jobs.one_gradient, path, shared(1, options), 1, True)[0]
    largest = max(float(value.abs().max()) for value in plain.values())
    for found in ranks.run(jobs.one_gradient, path, shared(2, options), 1, True):
        assert_same(found, plain, largest * (1e-6 if dtype == "fp32" else 2e-2))


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_a_rank_keeps_its_share_of_the_activations(ranks: Ranks, tmp_path: Path, kv_heads: int) -> None:
    """Of two layers as many bytes as the estimate says. Rows are too short for attention by products, which
    keeps less."""
    rows, prompt, response = 8, 7, 9
    single = {"model_dtype": "fp32", "dtype": "fp32", "reshard_after_forward": False}
    options = {"model": {"enable_gradient_checkpointing": False}, "fsdp": single}
    sizes = SIZES | dict(num_key_value_heads=kv_heads, max_position_embeddings=64)
    for layers in (1, 3):
        saved(transformers.LlamaConfig(**sizes | dict(num_hidden_layers=layers)), tmp_path / str(layers))
    config = transformers.LlamaConfig(**sizes)
    shape = shape_of({**config.to_dict(), "model_type": config.model_type})
    for size in (1, 2, 4):
        lengths = RowSizes(prompt, response, 1, packed=True)
        tokens = tokens_of(MicroPlan(rows, None), lengths, most_rows=rows, ulysses=size)
        few, many = (
            ranks.run(
                ulysses_jobs.kept_bytes, str(tmp_path / layers), shared(size, options), rows, prompt, response
            )
            for layers in ("1", "3")
        )
        for one, three in zip(few, many, strict=True):
            assert (three - one) / 2 == pytest.approx(layer_costs(shape, tokens, 4).saved, rel=1e-9)


# --- what is refused ---------------------------------------------------------------------------------------


def test_heads_that_ranks_cannot_divide_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    heads = SIZES | dict(num_attention_heads=6, num_key_value_heads=3, hidden_size=24)
    saved(transformers.LlamaConfig(**heads), tmp_path)
    for reported in ranks.run(jobs.refusal, str(tmp_path), shared(4)):
        assert (
            f"fsdp_config.{KEY}=4: must divide the 6 attention heads of the model: 1, 2, 3 or 6" in reported
        )
        assert f"-> fsdp_config.{KEY}=3" in reported


@pytest.mark.parametrize("kind", ["gemma2", "doge", "nemotron"])
def test_models_whose_rows_are_padded_are_refused(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    saved(PADDED[kind], tmp_path)
    for reported in ranks.run(jobs.refusal, str(tmp_path), shared(2)):
        assert (
            f"those of a {kind} model cannot be packed: " in reported
            and f"-> fsdp_config.{KEY}=1" in reported
        )


def test_padded_rows_are_refused(ranks: Ranks, models: Path) -> None:
    options = shared(2, {"model": {"use_remove_padding": False}})
    for reported in ranks.run(jobs.refusal, str(models / "windows"), options):
        assert "use_remove_padding=false" in reported


# --- checkpoints and memory --------------------------------------------------------------------------------


@pytest.mark.parametrize(("written", "read"), [(2, 1), (1, 4)])
def test_checkpoints_do_not_depend_on_it(
    ranks: Ranks, models: Path, tmp_path: Path, written: int, read: int
) -> None:
    path, folder = str(models / "two heads of keys"), str(tmp_path)
    held = ranks.run(jobs.write_checkpoint, path, shared(written), folder)[0]
    for found in ranks.run(jobs.read_checkpoint, path, shared(read), folder):
        assert_same(found["weights"], held["weights"], 0.0)
        assert_same(found["moments"], held["moments"], 0.0)
        assert_same(found["next"], held["next"], 1e-12)


OOM_LAYOUTS: dict[str, dict[str, Any]] = {
    "two": shared(2),
    "four": shared(4, {"model": {"enable_gradient_checkpointing": False}}),
    "two copies": shared(2, {"fsdp": {"fsdp_size": 2}}),
}


@pytest.mark.parametrize("layout", OOM_LAYOUTS)
def test_memory_that_runs_out_on_some_ranks_leaves_no_trace(ranks: Ranks, models: Path, layout: str) -> None:
    """Every place in the first and the last pass: on one rank, on both of a group, on one of each group."""
    cases = oom_jobs.cases_of_four_ranks()
    path = str(models / "two heads of keys")
    some = cases if layout == "two" else cases[::3]
    for wrong in ranks.run(oom_jobs.disturbed, path, OOM_LAYOUTS[layout], some):
        assert wrong == []
