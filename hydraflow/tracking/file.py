"""metrics.jsonl: one JSON object per call, flushed at once, so that a run that dies leaves what it had.

In: numbers of a step. Out: `{"step": 3, "seconds": 12.5, "critic/score/mean": 0.5, ...}`; `seconds` is the run's wall time since its
trackers were opened. JSON has no NaN and no infinity: they are written as the strings "nan", "inf" and "-inf", which `float()` reads back.
"""

from __future__ import annotations

import json
import math
import time

from hydraflow.errors import EnvironmentFault
from hydraflow.tracking.base import RunInfo

METRICS_FILE = "metrics.jsonl"


class FileTracker:
    """Appends to metrics.jsonl in the run folder."""

    def __init__(self, run: RunInfo):
        self._path = run.folder / METRICS_FILE
        self._file = self._path.open("a", encoding="utf-8")
        self._start = time.monotonic() - run.seconds_before

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Writes one line. Raises EnvironmentFault when it cannot (a full disk)."""
        record: dict[str, float | str] = {"step": step, "seconds": round(time.monotonic() - self._start, 3)}
        record |= {name: json_number(value) for name, value in metrics.items()}
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise EnvironmentFault(f"cannot write {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def json_number(value: float) -> float | str:
    """The value as JSON can hold it.

    >>> json_number(0.5), json_number(float("nan")), json_number(float("-inf"))
    (0.5, 'nan', '-inf')
    """
    value = float(value)
    return value if math.isfinite(value) else str(value)
