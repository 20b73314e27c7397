"""Stages of the Megatron engine that have several parts of the layers say, learn and become what one rank
does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine import megatron_jobs as jobs
from engine.alike import assert_same, assert_sent
from engine.megatron_models import SIZES, sizes
from engine.megatron_ways import Oracle, assert_near, check
from engine.pool import Ranks
from transformers import Qwen2Config, Qwen3Config

DEEP = SIZES | dict(num_key_value_heads=2, num_hidden_layers=8)
FAMILIES = {
    "qwen2": Qwen2Config(**DEEP, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**DEEP, head_dim=16, tie_word_embeddings=False),
}

GROUP_SIZES = (2, 4)


def interleaved(chunks: int, tensor: int = 1, stages: int = 2, **others: Any) -> dict[str, Any]:
    return sizes(tensor, stages, virtual_pipeline_model_parallel_size=chunks, **others)


LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "two": ("qwen3", 2, interleaved(2)),
    "four, plain optimizer": ("qwen2", 2, interleaved(4, use_distributed_optimizer=False)),
    "two, tp 2": ("qwen2", 4, interleaved(2, 2)),
    "two, data 2": ("qwen2", 4, interleaved(2)),
    "two, context 2": ("qwen3", 4, interleaved(2, context_parallel_size=2)),
    "two, pp 4": ("qwen2", 4, interleaved(2, 1, 4)),
}
"""Family, ranks and settings."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(pools: dict[int, Ranks], oracle: Oracle, layout: str) -> None:
    family, ranks, settings = LAYOUTS[layout]
    check(pools[ranks], oracle, family, settings, micro_batches=4)


@pytest.mark.parametrize(("layout", "micro_batches"), [("two", 1), ("two, data 2", 1), ("two, pp 4", 2)])
def test_micro_batches_that_do_not_fill_the_stages(
    pools: dict[int, Ranks], oracle: Oracle, layout: str, micro_batches: int
) -> None:
    family, ranks, settings = LAYOUTS[layout]
    check(pools[ranks], oracle, family, settings, micro_batches=micro_batches)


def test_values(pools: dict[int, Ranks], oracle: Oracle) -> None:
    check(pools[2], oracle, "qwen2", interleaved(2), head="value", near=1e-4)  # values up to 13


def test_weights_come_to_one_rank(pools: dict[int, Ranks], oracle: Oracle) -> None:
    path = str(oracle.folder / "qwen2")
    sent = pools[2].run(jobs.weights_to, path, {"megatron": interleaved(2)}, [1])
    assert_sent(sent, [1], pools[2].run(jobs.weights_to, path, {"megatron": sizes()})[0][0])


def test_a_checkpoint_is_read_with_other_sizes(
    pools: dict[int, Ranks], oracle: Oracle, tmp_path: Path
) -> None:
    path, steps = str(oracle.folder / "qwen2"), 1
    settings = {"megatron": interleaved(2)}
    held = pools[2].run(jobs.write_checkpoint, path, settings, str(tmp_path), steps)
    for read in (interleaved(4), sizes(2)):
        found = pools[2].run(jobs.read_checkpoint, path, {"megatron": read}, str(tmp_path), steps)
        for rank in found:
            assert rank["steps"] == {1.0}
            assert_same(rank["weights"], held[0]["weights"])
            assert_near(rank["next"], held[0]["next"])


def test_layers_that_the_parts_do_not_divide(pools: dict[int, Ranks], oracle: Oracle) -> None:
    path = str(oracle.folder / "qwen2")
    for reported in pools[2].run(jobs.refusal, path, {"megatron": interleaved(3)}):
        assert "must divide the 4 layers of each stage" in reported
