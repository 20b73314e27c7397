"""Ranks of the Megatron engine that share the tokens of their lines say, learn and become what one rank does
that has whole lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine import megatron_jobs as jobs
from engine.alike import assert_same, assert_sent
from engine.megatron_models import SIZES, save_model, sizes
from engine.megatron_ways import Oracle, assert_near, check
from engine.pool import Ranks
from transformers import Qwen3Config

PLAIN = {"use_distributed_optimizer": False}

GROUP_SIZES = (2, 4)


def shared(context: int, tensor: int = 1, stages: int = 1, **others: Any) -> dict[str, Any]:
    return sizes(tensor, stages, context_parallel_size=context, **others)


LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "two": ("qwen3", 2, shared(2)),
    "two, plain optimizer": ("llama", 2, shared(2, **PLAIN)),
    "as many as heads, more than heads of keys": ("qwen2", 4, shared(4)),
    "two, two with other rows": ("qwen3", 4, shared(2)),
    "two, two with other rows, plain optimizer": ("qwen2", 4, shared(2, **PLAIN)),
    "two of each tensor-parallel rank": ("qwen3", 4, shared(2, 2)),
    "two of each tensor-parallel rank, no sp": ("qwen2", 4, shared(2, 2, sequence_parallel=False)),
    "two on each stage": ("qwen2", 4, shared(2, 1, 2)),
}
"""Family, ranks and settings."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(pools: dict[int, Ranks], oracle: Oracle, layout: str) -> None:
    family, ranks, settings = LAYOUTS[layout]
    check(pools[ranks], oracle, family, settings)


@pytest.mark.parametrize("layout", ["two", "two of each tensor-parallel rank", "two on each stage"])
def test_values(pools: dict[int, Ranks], oracle: Oracle, layout: str) -> None:
    _, ranks, settings = LAYOUTS[layout]
    check(pools[ranks], oracle, "qwen2", settings, head="value", near=5e-5)  # values up to 9


@pytest.mark.parametrize("kind", ["one token", "far apart", "samples"])
@pytest.mark.parametrize("layout", ["two", "two of each tensor-parallel rank"])
def test_every_kind_of_rows(pools: dict[int, Ranks], oracle: Oracle, layout: str, kind: str) -> None:
    """Lines that the ranks do not divide, shares without an asked token, and prompts that rows share."""
    _, ranks, settings = LAYOUTS[layout]
    check(pools[ranks], oracle, "qwen3", settings, kind=kind, micro_batches=1)


def test_no_checkpointing_of_activations(pools: dict[int, Ranks], oracle: Oracle) -> None:
    off = {"enable_gradient_checkpointing": False}
    check(pools[2], oracle, "qwen3", shared(2), model=off, micro_batches=4)


@pytest.mark.parametrize("layout", ["two", "two of each tensor-parallel rank"])
def test_padded_rows(pools: dict[int, Ranks], oracle: Oracle, layout: str) -> None:
    _, ranks, settings = LAYOUTS[layout]
    padded = {"use_remove_padding": False}
    check(pools[ranks], oracle, "qwen3", settings, kind="far apart", micro_batches=1, model=padded)


def test_weights_come_to_one_rank(pools: dict[int, Ranks], oracle: Oracle) -> None:
    path = str(oracle.folder / "qwen2")
    sent = pools[4].run(jobs.weights_to, path, {"megatron": shared(2, 1, 2)}, range(4))
    assert_sent(sent, range(4), pools[2].run(jobs.weights_to, path, {"megatron": sizes()})[0][0])


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_checkpoint_is_written_once_and_read_with_other_sizes(
    pools: dict[int, Ranks], oracle: Oracle, tmp_path: Path, optimizer: bool
) -> None:
    path, steps = str(oracle.folder / "qwen2"), 1
    written = {"megatron": shared(2, 2, use_distributed_optimizer=optimizer)}
    held = pools[4].run(jobs.write_checkpoint, path, written, str(tmp_path), steps)
    for read in (shared(2, 1, 2), sizes(2, 2)):
        found = pools[4].run(jobs.read_checkpoint, path, {"megatron": read}, str(tmp_path), steps)
        for rank in found:
            assert rank["steps"] == {1.0}
            assert_same(rank["weights"], held[0]["weights"])
            assert_near(rank["next"], held[0]["next"])


@pytest.mark.parametrize(
    ("settings", "words", "remedy"),
    [
        (shared(4), "must divide the 6 attention heads of each tensor-parallel rank", "size=3 or"),
        (shared(2, 2), "must divide the 3 attention heads of each tensor-parallel rank", "size=1 or"),
    ],
)
def test_heads_that_ranks_cannot_share(
    pools: dict[int, Ranks], tmp_path: Path, settings: dict[str, Any], words: str, remedy: str
) -> None:
    heads = dict(num_attention_heads=6, num_key_value_heads=2, head_dim=8)
    save_model(Qwen3Config(**SIZES | heads), tmp_path)
    for reported in pools[4].run(jobs.refusal, str(tmp_path), {"megatron": settings}):
        assert words in reported and f"context_parallel_{remedy}" in reported
