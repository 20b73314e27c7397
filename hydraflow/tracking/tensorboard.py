"""TensorBoard: every metric as a scalar and validation samples as text, in the run folder's tensorboard/.

In: metrics of a step. Out: an event file; view it with `tensorboard --logdir <run folder>`.
A full disk costs points of these curves and logs a warning, but never ends the run: metrics.jsonl is the
record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from hydraflow.tracking.base import SAMPLE_COLUMNS, SAMPLE_TABLE, RunInfo, Sample, Tracker, rows_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import FileWriter, SummaryWriter

logger = logging.getLogger(__name__)

PAUSE = 60.0
"""Seconds without a retry after a failure: every attempt creates a file."""


class TensorboardTracker(Tracker):
    """Writes scalars with the wall time at which they were logged."""

    def __init__(self, run: RunInfo):
        self._folder = run.folder / "tensorboard"
        # Hides points that an earlier start logged after its last checkpoint: those steps are repeated.
        self._void_from = run.done_steps + 1 if run.done_steps else None
        self._writer: SummaryWriter | None = None
        self._next_try = 0.0
        self._attempt(lambda writer: None)

    def log(self, metrics: dict[str, float], step: int) -> None:
        if self._writer is None and time.monotonic() < self._next_try:
            return

        from tensorboard.compat.proto.summary_pb2 import Summary

        # one event for the step: one for each metric costs milliseconds that the next step would wait for
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        step_event = Summary(value=values)
        self._attempt(lambda writer: cast("FileWriter", writer.file_writer).add_summary(step_event, step))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Adds the samples as a table of the text dashboard."""
        self._attempt(lambda writer: writer.add_text(SAMPLE_TABLE, markdown(samples), global_step=step))

    def flush(self) -> None:
        if self._writer is not None:
            self._attempt(lambda writer: writer.flush())

    def close(self, *, failed: bool = False) -> None:
        """Writes what is queued and closes the event file."""
        if self._writer is not None:
            self._attempt(lambda writer: writer.close())

    def _attempt(self, work: Callable[[SummaryWriter], None]) -> None:
        # Imported late: it costs a second, and runs without this tracker should not pay it.
        from torch.utils.tensorboard import SummaryWriter

        try:
            if self._writer is None:
                self._writer = SummaryWriter(log_dir=str(self._folder), purge_step=self._void_from)
                self._void_from = None
            work(self._writer)
        except OSError as error:
            self._writer, self._next_try = None, time.monotonic() + PAUSE
            text = "%s: %s; its curves will lack points until there is room"
            logger.warning(text, self._folder, error.strerror)


def markdown(samples: Sequence[Sample]) -> str:
    """The samples as a table, with their text verbatim, not as Markdown.

    >>> print(markdown([{"input": "1+1=", "output": "<b>2|", "score": 1.0, "ground_truth": "2"}]))
    | input | output | score | ground_truth |
    |---|---|---|---|
    | `1+1=` | `<b>2\\|` | `1.0` | `2` |
    """
    lines = [f"| {' | '.join(SAMPLE_COLUMNS)} |", "|---" * len(SAMPLE_COLUMNS) + "|"]
    lines += [f"| {' | '.join(map(_code, row))} |" for row in rows_of(samples)]
    return "\n".join(lines)


def _code(value: str | float) -> str:
    text = str(value).replace("|", "\\|").replace("\r", "").replace("\n", " ⏎ ")
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}" if text.strip() else ""
