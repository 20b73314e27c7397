"""Rejection and importance weights of one row, written from their definitions with loops: from log r of its
trained tokens, where r is the ratio of the trainer's probability to the engine's."""

from __future__ import annotations

import math
from collections.abc import Callable

K: dict[str, Callable[[float], float]] = {
    "k1": lambda x: -x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: math.exp(x) - 1 - x,
}
OVER: dict[str, Callable[[list[float]], float]] = {
    "seq_sum": math.fsum,
    "seq_mean": lambda values: math.fsum(values) / len(values),
    "seq_max": max,
}


def oracle_kept(row: list[float], rule: str, upper: float, lower: float) -> list[bool]:
    """Of a row's trained tokens, from log r."""
    if not row:
        return []
    over, _, form = rule.rpartition("_")
    values = [K[form](x) for x in row]
    if over != "token":
        values = [OVER[over](values)] * len(row)
    if form == "k1":
        return [lower <= math.exp(-value) <= upper for value in values]
    return [value <= upper for value in values]


def oracle_weights(row: list[float], level: str, upper: float, lower: float | None) -> list[float]:
    ratios = [math.exp(x) for x in row] if level == "token" else [math.exp(math.fsum(row))] * len(row)
    if lower is None:
        return [min(ratio, upper) for ratio in ratios]
    return [ratio if lower <= ratio <= upper else 0.0 for ratio in ratios]
