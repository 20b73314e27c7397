"""A metric that knows how it is reduced over micro-batches, ranks and optimizer steps.

In: numbers from workers. Out: one float per name. Token-weighted means stay exact however the work was split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A value and its weight under one way of reducing it: mean (weighted), sum, max, min, std (unbiased), or
    eff_sample_size.

    >>> merge([{"loss": mean(2.0, weight=1)}, {"loss": mean(5.0, weight=2)}])["loss"].value
    4.0
    """

    how: str
    value: float
    weight: float = 1.0
    center: float = 0.0
    """The mean, for a standard deviation."""
    moments: tuple[float, float] = (0.0, 0.0)
    """Mean of the values and mean of their squares, for an effective sample size."""

    def __add__(self, other: Metric) -> Metric:
        assert self.how == other.how, f"one metric reduced both by {self.how} and by {other.how}"
        if self.how == "mean":
            return mean(self._mean_with(other, self.value, other.value), self.weight + other.weight)
        if self.how == "eff_sample_size":
            moments = [self._mean_with(other, *pair) for pair in zip(self.moments, other.moments)]
            return eff_sample_size(*moments, weight=self.weight + other.weight)
        if self.how == "std":
            return self._spread_with(other)
        if self.how == "sum":
            return Metric("sum", self.value + other.value)
        if math.isnan(other.value):  # max and min would return whichever comes first
            return other
        return Metric(self.how, (max if self.how == "max" else min)(self.value, other.value))

    def _mean_with(self, other: Metric, mine: float, its: float) -> float:
        """The weighted mean; a part without weight does not count, whatever its value."""
        parts = [(value, part.weight) for value, part in ((mine, self), (its, other)) if part.weight]
        return sum(value * weight for value, weight in parts) / sum(w for _, w in parts) if parts else 0.0

    def _spread_with(self, other: Metric) -> Metric:
        """Combines the standard deviations and means of two parts (Chan, Golub, LeVeque 1979)."""
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
    return Metric("sum", float(value))


def maximum(value: float) -> Metric:
    return Metric("max", float(value))


def minimum(value: float) -> Metric:
    return Metric("min", float(value))


def eff_sample_size(mean: float, square: float, *, weight: float) -> Metric:
    """The effective sample size of `weight` values with this mean and this mean of squares, as a share.

    >>> parts = [{"size": eff_sample_size(x, x * x, weight=1)} for x in (1.0, 3.0)]
    >>> merge(parts)["size"].value  # 2 squared, divided by (1 + 9) / 2
    0.8
    """
    share = mean * mean / square if square else 0.0
    return Metric("eff_sample_size", share, weight, moments=(mean, square))


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
