"""What a tracker is: something that takes numbers and samples of a step, and is closed at the end.

In: plain floats, already reduced over micro-batches and ranks; validation samples as rows of
`SAMPLE_COLUMNS`. Out: a file, an event log, a line on a terminal, a run on a server. Left out on purpose:
images, weights; nothing here produces or sends them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Sample = Mapping[str, object]
"""One validation response: the keys of `SAMPLE_COLUMNS`."""
SAMPLE_COLUMNS = ("input", "output", "score", "ground_truth")
"""The prompt and the response as text, the reward function's score, and what the response was compared
with."""


class Tracker(Protocol):
    """Where metrics go."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Takes the numbers of one training step. Steps never go down; one step may come in several calls."""

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Takes some of a validation's responses, for people to read. A tracker that has no tables leaves
        them."""

    def flush(self) -> None:
        """Has everything that was logged outlast a kill of this process. Called before a checkpoint is saved;
        OSError puts that off."""

    def close(self, *, failed: bool = False) -> None:
        """Writes what is still held. Called once, also after a failure or Ctrl-C (`failed`); nothing is
        logged afterwards."""


@dataclass(frozen=True)
class About:
    """What a tracker that others look at may tell about a run."""

    project: str = "hydraflow"
    experiment: str = "run"
    config: Mapping[str, Any] = field(default_factory=dict)
    """The whole configuration as plain values, without secrets (`redact.public`)."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Of this start: command line, git commit, versions (`provenance.facts_of_start`)."""
    files: tuple[Path, ...] = ()
    """Files of the run folder that are kept with the run: configuration, plan, run.json."""
    wandb_proxy: str | None = None
    """Proxy for Weights & Biases alone."""


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
    about: About = field(default_factory=About)
    redraws: bool = True
    """Whether the console may draw its display in place; false: somebody types at a debugger there."""


TrackerFactory = Callable[[RunInfo], Tracker]


def rows_of(samples: Sequence[Sample]) -> list[list[str | float]]:
    """The samples as a table's rows: every column is text, but for the score, which is a number. Some
    trackers refuse what is mixed.

    >>> rows_of([{"input": "1+1=", "output": "2", "score": 1, "ground_truth": 2}])
    [['1+1=', '2', 1.0, '2']]
    >>> rows_of([{"input": "?", "output": "", "ground_truth": None}])
    [['?', '', nan, '']]
    """
    return [
        [_score(sample.get(name)) if name == "score" else _text(sample.get(name)) for name in SAMPLE_COLUMNS]
        for sample in samples
    ]


def _score(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _text(value: object) -> str:
    return "" if value is None else str(value)
