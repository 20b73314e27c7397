"""Faults and unusual events of a run, as sentences.

In: a `Run`. Out: findings with a weight. Left out on purpose: causes; the logs and docs/faults.md have them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from hydraflow.redact import public_text
from hydraflow.report.reading import Run, finite, rows_of
from hydraflow.tracking.endings import DONE, is_orderly
from hydraflow.tracking.symptoms import is_needed, symptoms_of

SHOWN_STEPS = 12
SERIOUS, NOTABLE, FINE = "serious", "notable", "fine"


@dataclass(frozen=True)
class RunFinding:
    """One line of the page's list."""

    weight: str
    """serious, notable or fine."""
    what: str
    detail: str = ""


def ending(run: Run) -> RunFinding:
    """How the run ended, in a word or two and in detail. From summary.json, which is missing only after a
    kill."""
    why = run.summary.get("why_it_ended")
    if isinstance(why, str) and why:
        weight = FINE if why == DONE else NOTABLE if is_orderly(why) else SERIOUS
        words = {FINE: "done", NOTABLE: "stopped", SERIOUS: "failed"}
        return RunFinding(weight, words[weight], why)
    written = ""
    if run.last_written:
        at = datetime.fromtimestamp(run.last_written).astimezone()
        written = f"; last written {at.strftime('%Y-%m-%d %H:%M:%S %Z')}"
    return RunFinding(NOTABLE, "no recorded end", f"it is still running, or was killed{written}")


def findings(run: Run) -> list[RunFinding]:
    """All findings, the ending first."""
    end = ending(run)
    known = end.what != "no recorded end"
    found = [RunFinding(end.weight, f"Ended: {end.detail}" if known else end.detail.capitalize())]
    for look in (_requeue, _starts, _symptoms, _counts, _not_finite, _checkpoints, _files):
        found += look(run)
    return found


def _requeue(run: Run) -> Iterator[RunFinding]:
    file = run.folder / "requeue"
    try:
        note = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    except (OSError, ValueError):
        note = {}
    if isinstance(note, dict):
        why = public_text(str(note.get("why", "")))
        yield RunFinding(NOTABLE, f"Waits to resume after step {note.get('step', '?')}", why)


def _starts(run: Run) -> Iterator[RunFinding]:
    for number, start in enumerate(run.starts[1:], 2):
        detail = f"{start.get('started', 'time unknown')} on {start.get('host', 'an unknown host')}"
        what = f"Start {number}: resumed after step {start.get('after_step', '?')}"
        yield RunFinding(NOTABLE, what, detail)
    restarts = run.columns.get("training/restarts")
    most = max(finite(restarts.values), default=0) if restarts is not None else 0
    if most > 0:
        what = f"Restarted automatically after a worker failed, {_times(int(most))} in one start"
        yield RunFinding(SERIOUS, what, "metric training/restarts")


def _symptoms(run: Run) -> Iterator[RunFinding]:
    for sentence in symptoms_of(rows_of(run, filter(is_needed, run.columns))):
        steps, _, what = sentence.partition(": ")
        yield RunFinding(SERIOUS, what[:1].upper() + what[1:], steps)


_COUNTED = (
    ("skipped_steps", SERIOUS, "Optimizer steps skipped for a gradient that is not finite"),
    ("oom_splits", NOTABLE, "Forward passes split after running out of memory"),
    ("reward/failed_rows", SERIOUS, "Rows that the reward function could not score"),
)


def _counts(run: Run) -> Iterator[RunFinding]:
    for counter, weight, what in _COUNTED:
        for name, column in sorted(run.columns.items()):
            if name != counter and not name.endswith(f"/{counter}"):
                continue
            values = np.where(np.isfinite(column.values), column.values, 0.0)
            if (total := float(values.sum())) > 0:
                where = f"{name}, {_in_steps(column.steps[values > 0])}"
                yield RunFinding(weight, f"{what}: {total:g}", where)


def _not_finite(run: Run) -> Iterator[RunFinding]:
    for name, column in sorted(run.columns.items()):
        broken = column.steps[~np.isfinite(column.values)]
        if len(broken):
            what = f"{name} was not a finite number, {_times(len(broken))}"
            yield RunFinding(SERIOUS, what, _in_steps(broken))


def _checkpoints(run: Run) -> Iterator[RunFinding]:
    for path in sorted(run.folder.glob("*.damaged*")):
        what = f"Damaged checkpoint: {path.name}"
        yield RunFinding(SERIOUS, what, "it was skipped, and an older one was used")
    for path in sorted(run.folder.glob("*.unfinished")):
        what = f"Checkpoint that was never finished: {path.name}"
        yield RunFinding(NOTABLE, what, "the next start removes it")
    if kept := sum(path.is_file() for path in run.folder.glob("skipped/*")):
        yield RunFinding(NOTABLE, f"Rows of skipped steps are kept in skipped/: {kept} files")


def _files(run: Run) -> Iterator[RunFinding]:
    for path in sorted(run.folder.glob("earlier-*")):
        yield RunFinding(FINE, f"An earlier run of this folder was moved to {path.name}/")
    if run.missing_steps:
        missing = f"{run.missing_steps} steps between its first and its last"
        yield RunFinding(NOTABLE, f"metrics.jsonl has no line for {missing}")
    for text in run.unread:
        yield RunFinding(NOTABLE, "Could not be read", text)


def _in_steps(steps: np.ndarray) -> str:
    """The steps in words; if there are many, the first ones."""
    shown = ", ".join(str(step) for step in steps[:SHOWN_STEPS].tolist())
    more = len(steps) - SHOWN_STEPS
    return f"{'step' if len(steps) == 1 else 'steps'} {shown}" + (f" and {more} more" if more > 0 else "")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
