"""The page itself: one self-contained file with its styles, script and data.

In: runs. Out: HTML. Everything that comes from a run (samples above all) is text: the template escapes it,
the data are escaped for their context, and the page's content security policy forbids any other script and
any request. Left out on purpose: numbers and words, which the other files of this folder make.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hydraflow.report import tables
from hydraflow.report.catalogue import FOLDED, GROUPS, is_shown, metric
from hydraflow.report.faults import ending, findings
from hydraflow.report.reading import Run
from hydraflow.report.series import Axes, curve, points_per_curve

HERE = Path(__file__).parent
PHASE_POINTS = 240


def render(runs: Sequence[Run]) -> str:
    """The page about one or more runs."""
    name_apart(runs)
    axes = Axes()
    charts, most = chart_data(runs, axes)
    phases = [tables.phases(run, axes, PHASE_POINTS) for run in runs]
    phase_data = [data for data, _ in phases]
    samples = [tables.samples(run) for run in runs]  # before the findings, which list what could not be read
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    strict: dict[str, Any] = {"autoescape": True, "undefined": StrictUndefined}
    environment = Environment(loader=FileSystemLoader(HERE), trim_blocks=True, lstrip_blocks=True, **strict)
    data = {"runs": [run.name for run in runs], "axes": axes.listed, "charts": charts, "phases": phase_data}
    text = environment.get_template("page.html.j2").render(
        title=" · ".join(run.name for run in runs[:3]) + (" …" if len(runs) > 3 else ""),
        policy=policy(style, script),
        style=Markup(style),
        script=Markup(script),
        data=Markup(embedded(data)),
        runs=[
            {"name": run.name, "folder": str(run.folder), "ending": ending(run), "starts": tables.starts(run)}
            for run in runs
        ],
        key_numbers=tables.key_numbers(runs),
        groups=grouped(charts),
        folded=FOLDED,
        thinned=thinned({axes.listed[one["x"]]["w"] for chart in charts for one in chart["curves"]}, most),
        bar_widths=[axes.listed[one["x"]]["w"] if one else 1 for one in phase_data],
        phase_rows=[rows for _, rows in phases],
        samples=samples,
        samples_shown=(tables.SHOWN_VALIDATIONS, tables.SHOWN_SAMPLES),
        configurations=[tables.configuration(run) for run in runs],
        differences=tables.differences(runs),
        plans=[tables.plan(run) for run in runs],
        versions=tables.versions(runs),
        findings=[findings(run) for run in runs],
        made=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )
    return text.encode(errors="replace").decode()  # a lone surrogate cannot be encoded


def name_apart(runs: Sequence[Run]) -> None:
    """Makes names unique: runs of the same name are prefixed with their parent folder, and numbered if that
    does not help (the same folder twice)."""
    for run in _namesakes(runs):
        run.name = f"{run.folder.parent.name}/{run.name}"
    for run in _namesakes(runs):
        run.name = f"{run.name} ({runs.index(run) + 1})"


def _namesakes(runs: Sequence[Run]) -> list[Run]:
    counts = Counter(run.name for run in runs)
    return [run for run in runs if counts[run.name] > 1]


def chart_data(runs: Sequence[Run], axes: Axes) -> tuple[list[dict[str, Any]], int]:
    """Every metric's curves in the order of the page, and how many points a curve may have."""
    names = sorted({name for run in runs for name in run.columns if is_shown(name)}, key=_place)
    most = points_per_curve(sum(name in run.columns for run in runs for name in names))
    charts = []
    for name in names:
        shown = metric(name)
        curves: list[dict[str, Any]] = []
        for number, run in enumerate(runs):
            if name in run.columns:
                curves.append({"run": number} | curve(run.columns[name], axes, most))
        words = {"name": name, "title": shown.title, "unit": shown.unit, "group": shown.group}
        charts.append({**words, "curves": curves})
    return charts, most


def _place(name: str) -> tuple[int, int, str]:
    shown = metric(name)
    return GROUPS.index(shown.group), shown.rank, name


@dataclass
class ChartGroup:
    """The charts under one heading, with their numbers."""

    title: str
    charts: list[tuple[int, dict[str, Any]]]
    constant: list[tuple[str, str]]
    """Metrics that never changed: name and value."""


def grouped(charts: Iterable[dict[str, Any]]) -> list[ChartGroup]:
    """The groups that are not empty."""
    groups = {title: ChartGroup(title, [], []) for title in GROUPS}
    for number, chart in enumerate(charts):
        group, value = groups[chart["group"]], constant_value(chart["curves"])
        if value is None:
            group.charts.append((number, chart))
        else:
            group.constant.append((chart["name"], value))
    return [group for group in groups.values() if group.charts or group.constant]


def constant_value(curves: Sequence[dict[str, Any]]) -> str | None:
    """The value that all points of these curves share; None: they differ, or there is a single point.

    >>> constant_value([{"y": [0, 0], "lo": [0, 0], "hi": [0, 0]}])
    '0'
    >>> constant_value([{"y": [0, 1]}]), constant_value([{"y": [1]}])
    (None, None)
    """
    values = {value for one in curves for name in ("y", "lo", "hi") for value in one.get(name, ())}
    points = sum(len(one["y"]) for one in curves)
    return f"{values.pop():g}" if len(values) == 1 and None not in values and points > len(curves) else None


def thinned(spans_used: Iterable[int], most: int) -> str:
    """The page's note on points that represent several steps; empty if there are none."""
    widths = sorted(width for width in spans_used if width > 1)
    if not widths:
        return ""
    spans = f"{widths[0]} steps" if len(widths) == 1 else f"{widths[0]} to {widths[-1]} steps"
    return (
        f"Curves of more than {most} points are thinned: each point is the mean of a span of {spans},"
        " and the band behind it reaches from the minimum to the maximum of the span. Nothing is"
        " smoothed; metrics.jsonl has every step."
    )


def policy(style: str, script: str) -> str:
    """The page's content security policy: its own style and script, by their hashes, and nothing else."""
    own = f"style-src 'sha256-{_hash(style)}'; script-src 'sha256-{_hash(script)}'; img-src data:"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def embedded(data: Any) -> str:
    """JSON for the inside of a script element: nothing in it can end the element or begin another.

    >>> embedded({"a": "</script><!--"})
    '{"a":"\\\\u003c/script\\\\u003e\\\\u003c!--"}'
    """
    # ASCII, so that JavaScript's other line terminators (U+2028, U+2029) are escaped, too
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
