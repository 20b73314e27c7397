"""The schedule by hand, and settings of one step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hydraflow.engine.base import StepOptions
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


def test_settings_are_those_of_one_step() -> None:
    """Two groups keep what they had, also after an error."""
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    groups = [{"params": [weights[0]], "lr": 0.1}, {"params": [weights[1]], "lr": 0.2, "eps": 1e-3}]
    adamw = torch.optim.AdamW(groups)  # type: ignore[arg-type]
    before = [dict(group) for group in adamw.param_groups]
    own = StepOptions(lr=3.0, betas=(0.5, 0.6), eps=0.7, weight_decay=0.8, clip_grad=0.9)
    with pytest.raises(ZeroDivisionError), own.applied(adamw.param_groups):
        for group, old in zip(adamw.param_groups, before, strict=True):
            assert group == old | dict(lr=3.0, betas=(0.5, 0.6), eps=0.7, weight_decay=0.8)
        raise ZeroDivisionError
    assert adamw.param_groups == before


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lr": -1e-3}, "lr=-0.001 must be at least 0"),
        ({"lr": math.nan}, "lr=nan must be at least 0"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) must be two numbers from 0 to below 1"),
        ({"betas": (0.9,)}, r"betas=\(0.9,\) must be two numbers"),
        ({"eps": 0.0}, "eps=0.0 must be above 0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must be at least 0"),
        ({"clip_grad": 0.0}, "clip_grad=0.0 must be above 0"),
    ],
)
def test_settings_of_a_step_have_the_ranges_of_the_keys(wrong: dict[str, Any], message: str) -> None:
    StepOptions(lr=0.0, betas=(0.0, 0.999), eps=1e-8, weight_decay=0.0, clip_grad=math.inf)
    with pytest.raises(ValueError, match=message):
        StepOptions(**wrong)
