"""Thinned curves are honest: nothing is outside the band, and the least and greatest values of all stay."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hydraflow.report.reading import MetricColumn
from hydraflow.report.series import Axes, curve, mean_at, rounded, spans_of


def column(values: list[float], first: int = 0) -> MetricColumn:
    steps = np.arange(first, first + len(values))
    return MetricColumn(steps, steps * 60.0, np.array(values))


def test_few_points_stay_as_they_are() -> None:
    axes = Axes()
    assert curve(column([0.5, math.nan, 1.0]), axes, most=3) == {"x": 0, "y": [0.5, None, 1]}
    assert axes.listed == [{"s": [0, 1, 2], "t": [0, 1, 2], "w": 1}]


def test_mean_least_and_greatest_of_each_span() -> None:
    axes = Axes()
    drawn = curve(column([1, 3, math.nan, 5, math.inf, math.nan, 7], first=10), axes, most=4)
    assert drawn == {"x": 0, "y": [2, 5, None, 7], "lo": [1, 5, None, 7], "hi": [3, 5, None, 7]}
    assert axes.listed[0] == {"s": [10, 12, 14, 16], "t": [10, 12, 14, 16], "w": 2}


def test_metrics_of_the_same_steps_share_an_axis() -> None:
    axes = Axes()
    assert [
        curve(column([1.0, 2.0]), axes, 5)["x"],
        curve(column([3.0, 4.0]), axes, 5)["x"],
        curve(column([1.0]), axes, 5)["x"],
    ] == [0, 0, 1]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(1, 50))
def test_no_value_lies_outside_the_band_and_the_extremes_stay(values: list[float], most: int) -> None:
    axes = Axes()
    drawn = curve(column(values, first=3), axes, most)
    assert len(drawn["y"]) <= most or len(values) <= most
    low, high = drawn.get("lo", drawn["y"]), drawn.get("hi", drawn["y"])
    assert (min(low), max(high)) == (rounded([min(values)])[0], rounded([max(values)])[0])
    width, first = axes.listed[0]["w"], axes.listed[0]["s"]
    for step, value in enumerate(values, 3):
        span = max(index for index, start in enumerate(first) if start <= step)
        assert first[span] <= step < first[span] + width
        assert (
            low[span] - abs(low[span]) * 1e-3 - 1e-12 <= value <= high[span] + abs(high[span]) * 1e-3 + 1e-12
        )


@given(st.sets(st.integers(0, 10**6), min_size=1), st.integers(1, 40))
def test_spans_hold_every_point_once(steps: set[int], most: int) -> None:
    at = np.array(sorted(steps))
    starts, width = spans_of(at, most)
    assert starts[0] == 0 and (np.diff(starts) > 0).all()
    assert len(starts) <= max(most, 1) or width == 1


def test_means_over_the_steps_of_another_column() -> None:
    sparse = MetricColumn(np.array([1, 3]), np.zeros(2), np.array([8.0, 4.0]))
    steps = np.arange(4)
    assert mean_at(sparse, steps, spans_of(steps, 2)[0]).tolist() == [4.0, 2.0], (
        "a step without a value took no time"
    )
