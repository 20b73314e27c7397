"""Draws docs/timeline.png from a timeline: python scripts/timeline_picture.py TIMELINE STEP PICTURE

In: a file of `ray_init.timeline_file` and the number of a training step in it. Out: a picture of that step,
one line per row of the trace, with a legend for spans too short for a label. Left out on purpose: everything
that a trace viewer does better; this is for the documentation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

Event = dict[str, Any]
RAY_PIDS = 10_000
"""Process ids from here on are of Ray's own rows, as in `dispatch/timeline.py`."""
LEAST_LABEL = 0.07
"""Fraction of the step that a span must exceed to be labelled in place."""


def rows_of(trace: dict[str, Any], step: int) -> tuple[Event, list[tuple[str, list[Event]]]]:
    """The step's span, and (label, spans) of every non-empty row except Ray's own."""
    events = trace["traceEvents"]
    names = {
        event["pid"]: event["args"]["name"]
        for event in events
        if event["name"] == "process_name" and event["pid"] < RAY_PIDS
    }
    around = next(
        event
        for event in events
        if event["ph"] == "X" and event["pid"] == 1 and event["name"] == f"step {step}"
    )
    rows: dict[tuple[int, int], list[Event]] = {}
    for event in events:
        begins_inside = event["ph"] == "X" and around["ts"] <= event["ts"] < around["ts"] + around["dur"]
        if begins_inside and event["pid"] in names and event is not around:
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    return around, [(_label(names[pid], tid), spans) for (pid, tid), spans in sorted(rows.items())]


def _label(role: str, rank: int) -> str:
    return role if role == "controller" else f"{role} {rank}"


def draw(around: Event, rows: list[tuple[str, list[Event]]], path: Path) -> None:
    """Writes the picture."""
    kinds = sorted({span["name"] for _, spans in rows for span in spans})
    colours = dict(zip(kinds, matplotlib.color_sequences["tab20"] * 3, strict=False))
    named = set()
    figure, axes = plt.subplots(figsize=(12, 0.5 * len(rows) + 1))
    for number, (_, spans) in enumerate(rows):
        for span in spans:
            begin, length = (span["ts"] - around["ts"]) / 1000, span["dur"] / 1000
            inner = span["name"] in ("gradient", "optimizer_step")
            axes.barh(
                number,
                length,
                left=begin,
                height=0.4 if inner else 0.8,
                color=colours[span["name"]],
                edgecolor="white",
                linewidth=0.5,
            )
            if span["dur"] > LEAST_LABEL * around["dur"] and not inner:
                axes.text(begin + length / 2, number, span["name"], ha="center", va="center", fontsize=7)
                named.add(span["name"])
    unnamed = [kind for kind in kinds if kind not in named]
    axes.legend(
        [Patch(color=colours[kind]) for kind in unnamed],
        unnamed,
        ncols=8,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.12),
        frameon=False,
    )
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, around["dur"] / 1000)
    axes.set_xlabel(f"milliseconds of {around['name']}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    source, wanted, target = sys.argv[1:]
    draw(*rows_of(json.loads(Path(source).read_text()), int(wanted)), Path(target))
