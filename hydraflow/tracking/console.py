"""The terminal: a display that stays in place, or plain lines where stdout is a file or a pipe.

In: metrics of a step. Out: step and total steps, reward, accuracy of the last validation, speed, time left.
Left out on purpose: all other metrics; metrics.jsonl has them.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hydraflow.tracking.base import RunInfo, Tracker
from hydraflow.tracking.history import validation_accuracy
from hydraflow.tracking.summary import duration

SHOWN = (
    ("reward", "critic/score/mean", "{:.3f}"),
    ("loss", "train/loss", "{:.4f}"),
    ("val loss", "val/loss", "{:.4f}"),
    ("length", "response_length/mean", "{:.1f}"),
    ("tokens/s per device", "perf/throughput", "{:.0f}"),
    ("s/step", "timing_s/step", "{:.2f}"),
)
"""Label, metric, format. A metric that the run does not log is not shown."""

ORDER = ("accuracy", *(label for label, _, _ in SHOWN))
RECENT_STEPS = 6
PACE_STEPS = 20


@dataclass
class RunProgress:
    """Progress of the run, updated from the logged metrics."""

    total_steps: int | None
    step: int = 0
    shown: dict[str, str] = field(default_factory=dict)
    """Label -> the newest value, as text; the accuracy is that of the last validation."""
    last: deque[tuple[int, float, dict[str, str]]] = field(default_factory=lambda: deque(maxlen=PACE_STEPS))
    """(step, seconds, values) of the last steps, from which the pace is estimated."""

    def note(self, metrics: dict[str, float], step: int, now: float) -> None:
        """Updates from the metrics of one call of `log`; `now`: seconds of any monotonic clock."""
        new = {label: text.format(metrics[name]) for label, name, text in SHOWN if name in metrics}
        if (accuracy := validation_accuracy(metrics)) is not None:
            new["accuracy"] = f"{accuracy:.3f}"
        merged = self.shown | new
        self.shown = {label: merged[label] for label in ORDER if label in merged}
        if self.last and self.last[-1][0] == step:
            self.last[-1][2].update(new)
        else:
            self.last.append((step, now, new))
        self.step = step

    def seconds_left(self) -> float | None:
        """Seconds left at the pace of the last steps; None before the second step, or if `total_steps` is not
        known."""
        if self.total_steps is None or len(self.last) < 2:
            return None
        (first, start, _), (last, end, _) = self.last[0], self.last[-1]
        return (end - start) / (last - first) * max(0, self.total_steps - last)

    def position(self) -> str:
        """Step, total steps and time left."""
        text = f"step {self.step}" if self.total_steps is None else f"step {self.step}/{self.total_steps}"
        left = self.seconds_left()
        return text if left is None else f"{text}, {duration(left)} left"


class PlainConsole(Tracker):
    """One line per call, for files, pipes and batch systems."""

    def __init__(self, run: RunInfo):
        self._progress = RunProgress(run.total_steps)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._progress.note(metrics, step, time.monotonic())
        values = "  ".join(f"{label} {value}" for label, value in self._progress.shown.items())
        print(f"{self._progress.position()}  {values}".rstrip(), flush=True)


class LiveConsole(Tracker):
    """A display redrawn in place. Other output appears above it; the last state stays on the
    terminal."""

    def __init__(self, run: RunInfo):
        self._title = run.title
        self._progress = RunProgress(run.total_steps)
        # No refresh thread: only log() draws, so an interrupt never finds a half-drawn display.
        self._live = Live(self._render(), console=Console(), auto_refresh=False)
        self._live.start()

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._progress.note(metrics, step, time.monotonic())
        self._live.update(self._render(), refresh=True)

    def close(self, *, failed: bool = False) -> None:
        """Restores the terminal: cursor visible, on a new line."""
        self._live.stop()

    def _render(self) -> Group:
        progress = self._progress
        head = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=progress.total_steps or 1, completed=progress.step, width=30)
        head.add_row(Text(self._title), bar, progress.position())
        labels = list(progress.shown)
        table = Table("step", *labels, box=None, padding=(0, 2, 0, 0))
        for step, _, values in list(progress.last)[-RECENT_STEPS:]:
            table.add_row(str(step), *(values.get(label, "") for label in labels))
        newest = Table.grid(padding=(0, 2, 0, 0))
        newest.add_row(*(f"{label} [bold]{value}[/bold]" for label, value in progress.shown.items()))
        return Group(head, newest, table) if labels else Group(head)


def open_console(run: RunInfo) -> Tracker:
    """The display where stdout is a terminal that can redraw, plain lines elsewhere."""
    redraws = run.redraws and sys.stdout.isatty() and not Console().is_dumb_terminal
    return LiveConsole(run) if redraws else PlainConsole(run)
