"""The schedule by hand."""

from __future__ import annotations

import pytest

from hydraflow.engine.config import OptimConfig
from hydraflow.engine.optim import lr_at


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
