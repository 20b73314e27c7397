"""A metric that knows how it is reduced over micro-batches, ranks and optimizer steps.

In: numbers from workers. Out: one float per name. Token-weighted means stay exact however the work was split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A value and its weight under one way of reducing it: mean (weighted), sum or max.

    >>> merge([{"loss": mean(2.0, weight=1)}, {"loss": mean(5.0, weight=2)}])["loss"].value
    4.0
    """

    how: str
    value: float
    weight: float = 1.0

    def __add__(self, other: Metric) -> Metric:
        assert self.how == other.how, f"one metric reduced both by {self.how} and by {other.how}"
        if self.how == "mean":
            weight = self.weight + other.weight
            total = self.value * self.weight + other.value * other.weight
            return Metric("mean", total / weight if weight else 0.0, weight)
        if self.how == "sum":
            return Metric("sum", self.value + other.value)
        return Metric("max", max(self.value, other.value))


def mean(value: float, weight: float = 1.0) -> Metric:
    """A mean over `weight` things (tokens, rows); merged as a weighted mean."""
    return Metric("mean", float(value), float(weight))


def summed(value: float) -> Metric:
    """A metric that is summed."""
    return Metric("sum", float(value))


def maximum(value: float) -> Metric:
    """A metric of which the maximum is kept."""
    return Metric("max", float(value))


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
