"""Reads metrics.jsonl back, and defines which of its metrics are the run's accuracy.

In: the run folder. Out: one record per step and curves of (step, seconds, value).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hydraflow.tracking.file import METRICS_FILE

Record = Mapping[str, float]
CORE, SUPERVISED_ACCURACY = "val-core/", "val/accuracy"


@dataclass(frozen=True)
class Point:
    """A point of a curve."""

    step: int
    seconds: float
    """Wall time of the run, earlier starts included."""
    value: float


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The records of metrics.jsonl in order of step, lines of the same step merged; [] without the file.

    Torn lines, written while the process or the machine was killed, are left out.
    """
    path = folder / METRICS_FILE
    if not path.exists():
        return []
    steps: dict[int, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        if record := record_of(line):
            steps.setdefault(int(record["step"]), {}).update(record)
    return [steps[step] for step in sorted(steps)]


def record_of(line: str) -> dict[str, float] | None:
    """The metrics of a line of metrics.jsonl; None if the line is torn or no such record.

    >>> record_of('{"step": 1, "seconds": 2.5, "critic/score/mean": "nan"}' + chr(10))
    {'step': 1.0, 'seconds': 2.5, 'critic/score/mean': nan}
    >>> record_of('{"step": 1, "seconds": 2.5}'), record_of('{"step": 1, "sec' + chr(10))
    (None, None)
    """
    try:
        record = {name: float(value) for name, value in json.loads(line).items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    whole = line.endswith("\n") and math.isfinite(record.get("step", math.nan)) and "seconds" in record
    return record if whole else None


def seconds_of(records: Iterable[Record]) -> float:
    """Wall time of the run up to its last record; 0 without one."""
    return max((record["seconds"] for record in records), default=0.0)


def curve(records: Iterable[Record], value_of: Callable[[Record], float | None]) -> list[Point]:
    """The points of the records for which `value_of` returns a value."""
    pairs = ((record, value_of(record)) for record in records)
    return [
        Point(int(record["step"]), record["seconds"], value) for record, value in pairs if value is not None
    ]


def validation_accuracy(metrics: Record) -> float | None:
    """Held-out accuracy, averaged over data sources; None where there was no validation.

    A reward function that reports no `acc` is represented by its reward; supervised training has one
    `val/accuracy`.

    >>> validation_accuracy({"val-core/sums/acc/mean@1": 0.5, "val-core/products/acc/mean@1": 0.25})
    0.375
    """
    for variable in ("acc", "reward"):
        names = [name for name in metrics if name.startswith(CORE) and f"/{variable}/mean@" in name]
        if names:
            return sum(metrics[name] for name in names) / len(names)
    return metrics.get(SUPERVISED_ACCURACY)


def is_validation(metric: str) -> bool:
    """Whether `validation_accuracy` may read it."""
    return metric.startswith(CORE) or metric == SUPERVISED_ACCURACY
