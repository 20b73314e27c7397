"""The schedule by hand, and splitting without ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine import rank_jobs as jobs

from hydraflow.engine.config import OptimConfig
from hydraflow.engine.micro_batches import split_rows, split_tokens
from hydraflow.engine.optim import lr_at
from hydraflow.protocol import ragged


def rates(steps: int, total: int, **options: object) -> list[float]:
    config = OptimConfig(lr=8.0, **options)  # type: ignore[arg-type]
    return [lr_at(config, step, total) for step in range(steps)]


def test_constant_after_warmup() -> None:
    assert rates(6, 6, lr_warmup_steps=4) == [0.0, 2.0, 4.0, 6.0, 8.0, 8.0]
    assert rates(2, 6) == [8.0, 8.0]


def test_ratio_counts_only_when_steps_are_not_given() -> None:
    assert rates(3, 20, lr_warmup_steps_ratio=0.1) == [0.0, 4.0, 8.0]
    assert rates(2, 20, lr_warmup_steps=0, lr_warmup_steps_ratio=0.1) == [8.0, 8.0]


def test_linear_and_cosine_end_at_the_smallest_rate() -> None:
    assert rates(7, 4, lr_scheduler_type="linear") == [8.0, 6.0, 4.0, 2.0, 0.0, 0.0, 0.0]
    assert rates(6, 4, lr_scheduler_type="cosine", min_lr_ratio=0.5) == pytest.approx(
        [8, 6 + 2**0.5, 6, 6 - 2**0.5, 4, 4]
    )


def test_rows_in_order_and_back() -> None:
    data = jobs.make_batch()
    parts = split_rows(data, 3)
    assert [len(part) for part in parts.parts] == [3, 3, 2]
    assert parts.restore(data) is data
    assert split_rows(data, 8).parts[0] is data


@pytest.mark.parametrize("agreed", [1, 5])
def test_tokens_within_budget_and_back(agreed: int) -> None:
    data = jobs.make_batch()
    parts = split_tokens(data, 30, lambda own: torch.maximum(own, torch.tensor([float(agreed)])))
    sizes = [
        int((ragged.lengths(p.batch["prompts"]) + ragged.lengths(p.batch["responses"])).sum())
        for p in parts.parts
    ]
    assert max(sizes) <= 30 and len(sizes) >= agreed
    joined = type(data).concat(parts.parts)
    for name in ("responses", "prompts"):
        restored = ragged.rows(parts.restore(joined).batch[name])
        assert all(torch.equal(a, b) for a, b in zip(restored, ragged.rows(data.batch[name]), strict=True))
    assert sorted(parts.order.tolist()) == list(np.arange(8))


def test_a_row_over_the_budget_is_named() -> None:
    with pytest.raises(ValueError):
        split_tokens(jobs.make_batch(), 4, lambda own: own)
