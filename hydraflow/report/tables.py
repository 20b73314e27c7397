"""The page's tables: key numbers, phase times, configuration and what differs, plan, versions, samples.

In: runs. Out: rows of text for the template. Left out on purpose: how they look.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hydraflow.report.reading import Run, as_text, finite, rows_of, samples_of
from hydraflow.report.series import Axes, mean_at, rounded, spans_of
from hydraflow.tracking.base import SAMPLE_COLUMNS
from hydraflow.tracking.history import is_validation, validation_accuracy
from hydraflow.tracking.summary import duration

SHOWN_VALIDATIONS, SHOWN_SAMPLES, LONGEST_TEXT = 5, 20, 2000
"""Validations, samples of each, and characters of a text on the page."""
OUTSIDE = ("testing", "save_checkpoint")
"""Phases that are not part of timing_s/step."""
SMALL_SHARE, MOST_PHASES = 0.005, 7
"""Phases with a smaller share of the time, and those after the seven longest, are drawn together, because
there are eight colours."""
NO_VALUE = "–"


def _accuracies(run: Run) -> np.ndarray:
    """Held-out accuracy of each validation, over all sources."""
    names = [name for name in run.columns if is_validation(name)]
    found = [validation_accuracy(row) for _, row in rows_of(run, names)]
    return np.array([one for one in found if one is not None])


def _values(run: Run, name: str) -> np.ndarray:
    """Values of a metric; none if the run has no such metric."""
    return run.columns[name].values if name in run.columns else np.array([])


def first_and_last(values: np.ndarray) -> str:
    """The first, last and best of a curve's finite values.

    >>> first_and_last(np.array([0.25, np.nan, 1.0, 0.5]))
    '0.25 → 0.5 (best 1)'
    """
    values = finite(values)
    if not len(values):
        return NO_VALUE
    return f"{values[0]:.4g} → {values[-1]:.4g} (best {values.max():.4g})"


def _median(name: str, unit: str) -> Callable[[Run], str]:
    def text(run: Run) -> str:
        values = finite(_values(run, name))
        return f"{np.median(values):.4g} {unit}" if len(values) else NO_VALUE

    return text


def _steps(run: Run) -> str:
    total = run.plan.get("total_steps")
    return f"{run.last_step} of {total}" if isinstance(total, int) and total else str(run.last_step)


KEY_NUMBERS: dict[str, Callable[[Run], str]] = {
    "Validation accuracy": lambda run: first_and_last(_accuracies(run)),
    "Held-out loss": lambda run: first_and_last(_values(run, "val/loss")).partition(" (")[0],
    "Training reward": lambda run: first_and_last(_values(run, "critic/score/mean")),
    "Training loss": lambda run: first_and_last(_values(run, "train/loss")).partition(" (")[0],
    "Training steps": _steps,
    "Wall time": lambda run: duration(run.seconds) if run.columns else NO_VALUE,
    "Time of a step, median": _median("timing_s/step", "s"),
    "Throughput, median": _median("perf/throughput", "tokens/s per device"),
}
"""Title -> a key number of a run."""


def key_numbers(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Title and each run's value; numbers that no run has are left out."""
    rows = [(title, [of(run) for run in runs]) for title, of in KEY_NUMBERS.items()]
    return [row for row in rows if any(value != NO_VALUE for value in row[1])]


def phases(run: Run, axes: Axes, most: int) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """The picture's data, and the table's rows, the longest phase first. Empty if no phase was timed."""
    prefix = "timing_s/"
    columns = {
        name.removeprefix(prefix): column for name, column in run.columns.items() if name.startswith(prefix)
    }
    step = columns.pop("step", None)
    base = step or max(columns.values(), key=lambda column: len(column.steps), default=None)
    if base is None:
        return {}, []
    begins, width = spans_of(base.steps, most)
    means = {name: mean_at(column, base.steps, begins) for name, column in columns.items()}
    totals = {name: float(finite(column.values).sum()) for name, column in columns.items()}
    none = np.zeros(len(begins))
    if step is not None:
        inside = [name for name in means if name not in OUTSIDE]
        within = sum((means[name] for name in inside), none)
        means["rest of the step"] = np.maximum(0.0, mean_at(step, base.steps, begins) - within)
        rest = float(finite(step.values).sum()) - sum(totals[name] for name in inside)
        totals["rest of the step"] = max(0.0, rest)
    whole = sum(totals.values()) or 1.0
    order = sorted(means, key=lambda name: -totals[name])
    large = [name for name in order if totals[name] / whole >= SMALL_SHARE][:MOST_PHASES]
    small = [name for name in order if name not in large]
    parts = [{"name": name, "y": rounded(means[name])} for name in large]
    if small:
        parts.append({"name": "others", "y": rounded(sum((means[name] for name in small), none))})
    x = axes.place(base.steps[begins], base.seconds[begins], width)
    rows = []
    for name in order:
        total = totals[name]
        text = duration(total) if total >= 60 else f"{total:.3g} s"
        mean = f"{total / max(1, len(base.steps)):.3g}"
        rows.append({"name": name, "total": text, "share": f"{100 * total / whole:.1f} %", "mean": mean})
    return {"x": x, "parts": parts}, rows


def configuration(run: Run) -> list[dict[str, Any]]:
    """Every key with value and origin; `set`: not left at its default."""
    return [
        {"key": key, "value": value, "origin": origin, "set": origin not in ("default", "")}
        for key, (value, origin) in sorted(run.settings.items())
    ]


def differences(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Keys whose values differ between the runs that have a configuration."""
    known = [run for run in runs if run.settings]
    if len(known) < 2:
        return []
    keys = sorted({key for run in known for key in run.settings})
    rows = []
    for key in keys:
        values = [run.settings[key][0] if key in run.settings else NO_VALUE for run in runs]
        if len({value for run, value in zip(runs, values) if run.settings}) > 1:
            rows.append({"key": key, "values": values})
    return rows


def plan(run: Run) -> tuple[list[dict[str, str]], list[str]]:
    """The plan's quantities and notes."""
    quantities = run.plan.get("quantities")
    rows = [row for row in quantities if isinstance(row, dict)] if isinstance(quantities, list) else []
    names = ("name", "value", "unit", "formula", "provenance")
    notes = run.plan.get("notes")
    lines = [{name: as_text(row.get(name, "")) for name in names} for row in rows]
    return lines, [as_text(note) for note in notes] if isinstance(notes, list) else []


def versions(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Library -> its version in each run's last start; `differs`: whether runs that record it disagree."""
    last = [run.starts[-1] if run.starts else {} for run in runs]
    found = [start["versions"] if isinstance(start.get("versions"), dict) else {} for start in last]
    names = list(dict.fromkeys(name for one in found for name in one))
    rows = [{"name": name, "values": [as_text(one.get(name, NO_VALUE)) for one in found]} for name in names]
    if any(last):
        rows.append({"name": "git", "values": [commit(start.get("git")) for start in last]})
        for what in ("platform", "host"):
            rows.append({"name": what, "values": [as_text(start.get(what) or NO_VALUE) for start in last]})
    return [row | {"differs": len(set(row["values"]) - {NO_VALUE}) > 1} for row in rows]


def commit(git: Any) -> str:
    """A commit in words.

    >>> commit({"commit": "abb04da7ec053e58", "branch": "main", "changed_files": 2})
    'abb04da7ec on main, 2 files changed since'
    """
    if not isinstance(git, Mapping) or not git.get("commit"):
        return NO_VALUE
    changed = git.get("changed_files")
    branch = f" on {git['branch']}" if git.get("branch") not in (None, "HEAD") else ""
    since = f", {changed} {'file' if changed == 1 else 'files'} changed since" if changed else ""
    return f"{str(git['commit'])[:10]}{branch}{since}"


def starts(run: Run) -> list[dict[str, str]]:
    """Each start of the run: when, where, after which step, by which command."""
    names = ("started", "after_step", "host", "command")
    rows = [{name: as_text(start.get(name, "")) for name in names} for start in run.starts]
    return [one | {"commit": commit(start.get("git"))} for one, start in zip(rows, run.starts, strict=True)]


def samples(run: Run) -> list[dict[str, Any]]:
    """Samples of up to `SHOWN_VALIDATIONS` validations, spread over the run, the last one first."""
    steps = sorted(run.samples)
    if len(steps) > SHOWN_VALIDATIONS:
        steps = [steps[round(index)] for index in np.linspace(0, len(steps) - 1, SHOWN_VALIDATIONS)]
    shown = []
    for step in reversed(steps):
        rows = samples_of(run, step)
        names = [name for name in SAMPLE_COLUMNS if any(name in row for row in rows)]
        cells = [[cut(row.get(name)) for name in names] for row in rows[:SHOWN_SAMPLES]]
        shown.append({"step": step, "names": names, "rows": cells, "count": len(rows)})
    return shown


def cut(value: object) -> str:
    """A text, cut to what a page can hold.

    >>> cut(None), cut(1.0), len(cut("a" * 5000))
    ('', '1.0', 2025)
    """
    text = "" if value is None else as_text(value)
    more = len(text) - LONGEST_TEXT
    return text if more <= 0 else f"{text[:LONGEST_TEXT]} … ({more} more characters)"
