"""Metrics of several parts are merged in any order."""

from __future__ import annotations

import math

import pytest

from hydraflow.metrics import Metric, maximum, mean, minimum


@pytest.mark.parametrize("of", [maximum, minimum])
def test_what_is_no_number_stays_whatever_the_order(of: type[Metric]) -> None:
    for parts in ([1.0, math.nan, 2.0], [math.nan, 1.0, 2.0], [1.0, 2.0, math.nan]):
        merged = of(parts[0]) + of(parts[1]) + of(parts[2])
        assert math.isnan(merged.value)


def test_an_empty_part_counts_for_nothing() -> None:
    assert (mean(math.nan, weight=0) + mean(2.0, weight=5)).value == 2.0
    assert (mean(2.0, weight=5) + mean(math.nan, weight=0)).value == 2.0
    assert (mean(1.0, weight=0) + mean(3.0, weight=0)).value == 0.0
