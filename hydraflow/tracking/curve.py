"""curve.png: learning curves against training steps and wall time.

In: metrics.jsonl of the run folder. Out: a PNG with one row per curve that the run has: validation accuracy
and training reward, or the losses of supervised training. Left out on purpose: every other metric;
TensorBoard shows those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hydraflow.errors import EnvironmentFault
from hydraflow.tracking.history import Record, curve, read_metrics, validation_accuracy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES: dict[str, Callable[[Record], float | None]] = {
    "validation accuracy": validation_accuracy,
    "training reward": lambda record: record.get("critic/score/mean"),
    "validation loss": lambda record: record.get("val/loss"),
    "training loss": lambda record: record.get("train/loss"),
}


def draw_curve(folder: Path, target: Path, *, title: str = "") -> bool:
    """Draws `target` from the folder's metrics; False, and no file, if there is nothing to draw.
    EnvironmentFault if the file cannot be written."""
    records = read_metrics(folder)
    curves = {name: points for name, value_of in CURVES.items() if (points := curve(records, value_of))}
    if not curves:
        return False
    # The figure and its canvas directly, not pyplot: no global state, and no display is needed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = 0.6 + 2.7 * len(curves)
    figure = Figure(figsize=(10, height))
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(curves), 2, sharex="col", sharey="row", squeeze=False)
    # margins in inches: matplotlib's own layouts take as long as the drawing
    figure.subplots_adjust(0.08, 0.5 / height, 0.985, 1 - 0.45 / height, wspace=0.06, hspace=0.1)
    for (by_step, by_time), (name, points) in zip(grid, curves.items()):
        values = [point.value for point in points]
        _draw(by_step, [point.step for point in points], values)
        _draw(by_time, [point.seconds / 60 for point in points], values)
        by_step.set_ylabel(name)
    grid[-1][0].set_xlabel("training step")
    grid[-1][1].set_xlabel("minutes")
    figure.suptitle(title, parse_math=False, y=1 - 0.12 / height, va="top")
    try:
        figure.savefig(target, dpi=120)
    except OSError as error:
        raise EnvironmentFault(f"cannot write {target}: {error.strerror}") from error
    return True


def _draw(axes: Axes, x: Sequence[float], y: Sequence[float]) -> None:
    """A line, with markers if the points are few enough to distinguish."""
    axes.plot(x, y, color="tab:blue", linewidth=1.4, marker="o" if len(x) <= 40 else None, markersize=3.5)
    axes.grid(alpha=0.3)
