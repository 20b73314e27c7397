"""What a tracker is: something that takes numbers of a step, and is closed at the end.

In: plain floats, already reduced over micro-batches and ranks. Out: a file, an event log, a line on a terminal.
Left out on purpose: text, images and tables; nothing here produces them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Tracker(Protocol):
    """Where metrics go."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Takes the numbers of one training step. Steps never go down; one step may come in several calls."""

    def flush(self) -> None:
        """Has everything that was logged outlast a kill of this process. Called before a checkpoint is saved."""

    def close(self) -> None:
        """Writes what is still held. Called once, also after a failure or Ctrl-C; nothing is logged afterwards."""


@dataclass(frozen=True)
class RunInfo:
    """What a tracker may know about the run."""

    folder: Path
    """The run folder; it exists and can be written."""
    title: str
    """Project and experiment, for people."""
    total_steps: int | None
    """Training steps planned; None: not known."""
    run_id: str = ""
    """Identity of the run: the same when it goes on after a stop."""
    done_steps: int = 0
    """Training steps of the run before this start; what was logged after them is void."""
    seconds_before: float = 0.0
    """Wall time of the run before this start."""
    redraws: bool = True
    """Whether the console may draw its display in place; false: somebody types at a debugger there."""


TrackerFactory = Callable[[RunInfo], Tracker]
