"""The result of a run: summary.json for programs, a table for people.

In: metrics.jsonl of the run folder and why the run ended. Out: a Summary, and text on the terminal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hydraflow.redact import public_text
from hydraflow.tracking.history import curve, read_metrics, validation_accuracy
from hydraflow.tracking.symptoms import symptoms_of


@dataclass(frozen=True)
class Summary:
    """The fields of summary.json."""

    first_val_accuracy: float | None
    """At the first validation; the reward where its function returns no `acc`. None: no validation."""
    last_val_accuracy: float | None
    """At the last validation."""
    best_val_accuracy: float | None
    """The highest of all validations."""
    steps: int
    """Number of training steps done."""
    seconds: float
    """Wall time of the whole run."""
    why_it_ended: str
    """For people: all steps done, the time limit, an interrupt, an error's first line."""
    first_val_step: int | None = None
    """Training steps done at the first validation."""
    symptoms: list[str] = field(default_factory=list)
    """Signs that the run did not learn (`symptoms.py`), one sentence each."""


def summarise(folder: Path, *, seconds: float, why_it_ended: str) -> Summary:
    """The summary of metrics.jsonl."""
    records = read_metrics(folder)
    validations = curve(records, validation_accuracy)
    accuracies = [point.value for point in validations]
    numbers = [value for value in accuracies if value == value]  # without NaN, which breaks max()
    return Summary(
        first_val_accuracy=accuracies[0] if accuracies else None,
        last_val_accuracy=accuracies[-1] if accuracies else None,
        best_val_accuracy=max(numbers) if numbers else None,
        steps=int(records[-1]["step"]) if records else 0,
        seconds=round(seconds, 1),
        why_it_ended=public_text(why_it_ended),
        first_val_step=validations[0].step if validations else None,
        symptoms=symptoms_of((int(record["step"]), record) for record in records),
    )


def print_summary(summary: Summary, folder: Path, console: Console | None = None) -> None:
    """Prints the table, the symptoms and the path of the run folder."""
    console = console or Console()
    if summary.first_val_accuracy is not None:
        first = f"first (step {summary.first_val_step})" if summary.first_val_step else "first"
        values = (summary.first_val_accuracy, summary.last_val_accuracy, summary.best_val_accuracy)
        shares = all(value is None or math.isnan(value) or 0 <= value <= 1 for value in values)
        table = Table(f"validation {'accuracy' if shares else 'reward'}", first, "last", "best")
        shown = (f"{100 * value:.1f}%" if shares else f"{value:.4g}" for value in values if value is not None)
        table.add_row("", *shown)
        console.print(table)
    for symptom in summary.symptoms:
        console.print(symptom, soft_wrap=True, markup=False, highlight=False)
    # soft_wrap: a path that is broken over two lines cannot be copied. markup: a path may hold [brackets].
    line = f"{summary.steps} steps in {duration(summary.seconds)}; ended because: {summary.why_it_ended}"
    console.print(f"{line}\nrun folder: {folder}", soft_wrap=True, markup=False, highlight=False)


def duration(seconds: float) -> str:
    """Seconds in readable form.

    >>> duration(42), duration(62), duration(3 * 3600 + 5 * 60 + 7)
    ('42s', '1m02s', '3h05m')
    """
    minutes, rest = divmod(int(round(seconds)), 60)
    if not minutes:
        return f"{rest}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
