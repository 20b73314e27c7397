"""metrics.jsonl: one JSON object per call, flushed at once, so that nothing is lost when a run dies.

While the disk is full, lines are held in memory, with a warning; they are written as soon as there is room.

In: metrics of a step. Out: `{"step": 3, "seconds": 12.5, "critic/score/mean": 0.5, ...}`; `seconds` is the
run's wall time, earlier starts included. JSON has no NaN and no infinity: they are written as the strings
"nan", "inf" and "-inf", which `float()` reads back.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time

from hydraflow.errors import EnvironmentFault
from hydraflow.tracking.base import RunInfo, Tracker

METRICS_FILE = "metrics.jsonl"
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Disk full or quota exceeded: may be temporary."""

logger = logging.getLogger(__name__)


class FileTracker(Tracker):
    """Appends to metrics.jsonl in the run folder. `RunFolder.write_samples` writes the samples."""

    def __init__(self, run: RunInfo):
        self._path = run.folder / METRICS_FILE
        # unbuffered: lines that a full disk rejected stay in _held
        self._file = self._path.open("ab", buffering=0)
        self._held = b""
        self._start = time.monotonic() - run.seconds_before

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Writes one line. Raises EnvironmentFault if that fails for a reason other than a full disk."""
        record: dict[str, float | str] = {"step": step, "seconds": round(time.monotonic() - self._start, 3)}
        record |= {name: json_number(value) for name, value in metrics.items()}
        warned = bool(self._held)
        self._held += (json.dumps(record, allow_nan=False) + "\n").encode()
        try:
            self._write()
        except OSError as error:
            if error.errno not in FULL:
                raise EnvironmentFault(f"cannot write {self._path}: {error.strerror}") from error
            if not warned:
                text = "%s: %s; metrics are held in memory until there is room"
                logger.warning(text, self._path, error.strerror)

    def flush(self) -> None:
        """Writes the held lines and flushes them to disk. Raises OSError if that fails: a checkpoint must not
        be ahead of its metrics."""
        self._write()
        os.fsync(self._file.fileno())

    def close(self, *, failed: bool = False) -> None:
        """Writes the held lines, or logs that they are lost, and closes the file."""
        try:
            try:
                self._write()
            finally:
                self._file.close()  # a network file system may report a full disk only here
        except OSError as error:
            logger.error("%s: %s; its last lines are lost", self._path, error.strerror)

    def _write(self) -> None:
        while self._held:
            self._held = self._held[self._file.write(self._held) :]


def json_number(value: float) -> float | str:
    """The value in a form that JSON can hold.

    >>> json_number(0.5), json_number(float("nan")), json_number(float("-inf"))
    (0.5, 'nan', '-inf')
    """
    value = float(value)
    return value if math.isfinite(value) else str(value)
