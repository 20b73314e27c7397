"""TensorBoard: every metric as a scalar, in the run folder's tensorboard/.

In: numbers of a step. Out: an event file; look at it with `tensorboard --logdir <run folder>`.
"""

from __future__ import annotations

from hydraflow.tracking.base import RunInfo


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

    def flush(self) -> None:
        """Writes what is queued."""
        self._writer.flush()

    def close(self) -> None:
        """Writes what is queued and closes the event file."""
        self._writer.close()
