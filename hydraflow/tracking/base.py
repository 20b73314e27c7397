"""The tracker interface: receives the metrics and samples of each step, and is closed at the end.

In: plain floats, already reduced over micro-batches and ranks; validation samples as rows of
`SAMPLE_COLUMNS`. Out: a file, an event log, a line on a terminal, a run on a server. Left out on purpose:
images, weights; nothing here produces or sends them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Sample = Mapping[str, object]
"""One validation response: the keys of `SAMPLE_COLUMNS`."""
SAMPLE_COLUMNS = ("input", "output", "score", "ground_truth")
"""The prompt and the response as text, the reward function's score, and what the response was compared
with."""
SAMPLE_TABLE = "val/generations"
"""Name of the samples' table in a tracker."""


class Tracker:
    """A destination of metrics. Trackers override only the methods that they need."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Logs metrics of one training step. Steps never decrease; a step may be logged in several calls."""

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Logs sample responses of a validation, for people to read."""

    def flush(self) -> None:
        """Flushes everything logged, so that it survives a kill of this process. Called before a checkpoint
        is saved; an OSError postpones the checkpoint."""

    def close(self, *, failed: bool = False) -> None:
        """Writes what is still pending. Called once, also after a failure or Ctrl-C (`failed`), and last."""


class Forwarder(Tracker):
    """Forwards every call through `_pass`, with copies of its arguments: the call may be made later."""

    def _pass(self, call: Callable[[Tracker], None]) -> None:
        raise NotImplementedError

    def log(self, metrics: dict[str, float], step: int) -> None:
        copy = dict(metrics)
        self._pass(lambda tracker: tracker.log(copy, step))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        copy = list(samples)
        self._pass(lambda tracker: tracker.log_samples(copy, step))

    def flush(self) -> None:
        self._pass(lambda tracker: tracker.flush())

    def close(self, *, failed: bool = False) -> None:
        self._pass(lambda tracker: tracker.close(failed=failed))


@dataclass(frozen=True)
class PublishedInfo:
    """What a shared tracker may publish about a run."""

    project: str = "hydraflow"
    experiment: str = "run"
    config: Mapping[str, Any] = field(default_factory=dict)
    """The whole configuration as plain values, without secrets (`redact.public`)."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts of this start: command line, git commit, versions (`provenance.facts_of_start`)."""
    files: tuple[Path, ...] = ()
    """Files of the run folder to upload: configuration, plan, run.json."""
    wandb_proxy: str | None = None
    """Proxy for Weights & Biases only."""


@dataclass(frozen=True)
class RunInfo:
    """What a tracker knows about the run."""

    folder: Path
    """The run folder; it exists and can be written."""
    title: str = ""
    """Display names: project and experiment."""
    total_steps: int | None = None
    """Planned training steps; None: unknown."""
    run_id: str = ""
    """Identity of the run: kept when it resumes."""
    done_steps: int = 0
    """Training steps completed before this start; anything logged for later steps is void."""
    seconds_before: float = 0.0
    """Wall time of the run before this start, in seconds."""
    about: PublishedInfo = field(default_factory=PublishedInfo)
    redraws: bool = True
    """Whether the console may draw its display in place; false: a debugger uses the terminal."""


TrackerFactory = Callable[[RunInfo], Tracker]


def rows_of(samples: Sequence[Sample]) -> list[list[str | float]]:
    """The samples as rows of a table: every column is text, except for the score, which is a number. Some
    trackers refuse columns of mixed types.

    >>> rows_of([{"input": "1+1=", "output": "2", "score": 1, "ground_truth": 2}])
    [['1+1=', '2', 1.0, '2']]
    >>> rows_of([{"input": "?", "output": "", "ground_truth": None}])
    [['?', '', nan, '']]
    """
    return [[_cell(name, sample.get(name)) for name in SAMPLE_COLUMNS] for sample in samples]


def _cell(column: str, value: object) -> str | float:
    if column == "score":
        return float(value) if isinstance(value, (int, float)) else math.nan
    return "" if value is None else str(value)


def flat(section: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings by dotted key; empty mappings are leaves.

    >>> list(flat({"a": {"b": 1}, "c": {}}))
    [('a.b', 1), ('c', {})]
    """
    for name, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
