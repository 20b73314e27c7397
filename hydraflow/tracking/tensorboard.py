"""TensorBoard: every metric as a scalar and validation samples as text, in the run folder's tensorboard/.

In: numbers of a step. Out: an event file; look at it with `tensorboard --logdir <run folder>`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydraflow.tracking.base import SAMPLE_COLUMNS, RunInfo, Sample, rows_of

TABLE = "val/generations"


class TensorboardTracker:
    """Writes scalars with the wall time at which they came."""

    def __init__(self, run: RunInfo):
        # Imported late: it costs a second, and runs without this tracker should not pay it.
        from torch.utils.tensorboard import SummaryWriter

        # What an earlier start of the run logged after its last checkpoint is hidden: those steps are done again.
        void_from = run.done_steps + 1 if run.done_steps else None
        self._writer = SummaryWriter(log_dir=str(run.folder / "tensorboard"), purge_step=void_from)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Adds one point to each metric's curve."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), global_step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Adds the samples as a table of the text dashboard."""
        self._writer.add_text(TABLE, markdown(samples), global_step=step)

    def flush(self) -> None:
        """Writes what is queued."""
        self._writer.flush()

    def close(self, *, failed: bool = False) -> None:
        """Writes what is queued and closes the event file."""
        self._writer.close()


def markdown(samples: Sequence[Sample]) -> str:
    """The samples as a table, their text as it is and not as Markdown.

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
