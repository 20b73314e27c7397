"""A metric that knows how it is reduced over micro-batches, ranks and optimizer steps.

In: numbers from workers. Out: one float per name. Token-weighted means stay exact however the work was split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A value and its weight under one way of reducing it: mean (weighted), sum, max or std (unbiased).

    >>> merge([{"loss": mean(2.0, weight=1)}, {"loss": mean(5.0, weight=2)}])["loss"].value
    4.0
    """

    how: str
    value: float
    weight: float = 1.0
    center: float = 0.0
    """Of a standard deviation: the mean."""

    def __add__(self, other: Metric) -> Metric:
        assert self.how == other.how, f"one metric reduced both by {self.how} and by {other.how}"
        if self.how == "mean":
            weight = self.weight + other.weight
            total = self.value * self.weight + other.value * other.weight
            return Metric("mean", total / weight if weight else 0.0, weight)
        if self.how == "std":
            return self._spread_with(other)
        if self.how == "sum":
            return Metric("sum", self.value + other.value)
        return Metric("max", max(self.value, other.value))

    def _spread_with(self, other: Metric) -> Metric:
        """Chan, Golub, LeVeque 1979: from two parts' standard deviations and means."""
        count = self.weight + other.weight
        if not (self.weight and other.weight):
            return self if self.weight else other
        apart = other.center - self.center
        squares = sum(part.value**2 * (part.weight - 1) for part in (self, other))
        squares += apart**2 * self.weight * other.weight / count
        center = self.center + apart * other.weight / count
        return Metric("std", math.sqrt(squares / (count - 1)), count, center)


def mean(value: float, weight: float = 1.0) -> Metric:
    """A mean over `weight` things (tokens, rows); merged as a weighted mean."""
    return Metric("mean", float(value), float(weight))


def summed(value: float) -> Metric:
    """A metric that is summed."""
    return Metric("sum", float(value))


def maximum(value: float) -> Metric:
    """A metric of which the maximum is kept."""
    return Metric("max", float(value))


def spread(value: float, weight: float, center: float) -> Metric:
    """The unbiased standard deviation of `weight` numbers with the mean `center`; merged exactly.

    >>> parts = [{"gap": spread(0.0, 1, center=1.0)}, {"gap": spread(2**0.5, 2, center=4.0)}]  # 1; 3 and 5
    >>> merge(parts)["gap"].value
    2.0
    """
    return Metric("std", float(value), float(weight), float(center))


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Reduces metrics of several micro-batches, steps or ranks, name by name."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name] + metric if name in merged else metric
    return merged


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Name -> reduced number."""
    return {name: metric.value for name, metric in metrics.items()}
