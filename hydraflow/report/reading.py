"""Reads as much of a run folder as possible, also of runs in progress, interrupted or damaged.

In: a folder. Out: a `Run`: columns of metrics, summary, configuration, plan, starts, samples, and what could
not be read. Left out on purpose: judging (`faults.py`) and drawing (`page.py`). ConfigError only for a folder
that holds no run at all.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hydraflow.data.files import depth
from hydraflow.errors import ConfigError, first_line
from hydraflow.redact import public, public_command
from hydraflow.system.paths import expanded
from hydraflow.tracking.base import flat

Numbers = np.ndarray
MARKS = ("metrics.jsonl", "config.yaml", "plan.json", "run.json", "summary.json", ".lock")
"""A folder with one of these files is a run folder."""
LARGEST_STEP = 10**15
"""Larger steps count as damage."""
DEEPEST = 50
"""Largest nesting depth of mappings and lists: no run writes more, and Python's stack could overflow."""


@dataclass(frozen=True)
class MetricColumn:
    """One metric: its value at the steps that have one, by rising step."""

    steps: Numbers
    """int64"""
    seconds: Numbers
    """float64, wall time of the run."""
    values: Numbers
    """float64, NaN and infinities as they were logged."""


@dataclass(eq=False)
class Run:
    """The contents of a run folder."""

    name: str
    folder: Path
    columns: dict[str, MetricColumn] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Configuration key -> value as text, origin."""
    plan: dict[str, Any] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[int, Path] = field(default_factory=dict)
    """Step of a validation -> its file."""
    unread: list[str] = field(default_factory=list)
    """What could not be read, in sentences."""
    missing_steps: int = 0
    """Number of steps between the first and the last that have no line in metrics.jsonl."""
    last_written: float | None = None
    """When metrics.jsonl was last written to, in seconds since 1970."""

    @property
    def last_step(self) -> int:
        """The last step in metrics.jsonl; 0 if there is none."""
        return max((int(column.steps[-1]) for column in self.columns.values()), default=0)

    @property
    def seconds(self) -> float:
        """Wall time up to the last step."""
        return max((float(column.seconds[-1]) for column in self.columns.values()), default=0.0)


def read_run(folder: Path) -> Run:
    """Reads the files of a run. Raises ConfigError when it is not a run folder."""
    path = expanded(folder).resolve()
    another = "name a run folder, such as runs/ppo-20250131-120000"
    try:
        is_folder = path.is_dir()
        there = {file.name for file in path.iterdir()} if is_folder else set()
    except OSError as error:
        raise ConfigError.one("RUN", folder, f"cannot be read: {error.strerror}", another) from error
    if not is_folder:
        raise ConfigError.one("RUN", folder, "is not a folder", another)
    if there.isdisjoint(MARKS):
        inside = sorted(mark.parent.name for mark in path.glob("*/metrics.jsonl"))
        rule = f"holds no run: it has neither {' nor '.join(MARKS[:3])}"
        raise ConfigError.one("RUN", folder, rule, f"{folder / inside[-1]}" if inside else another)
    run = Run(path.name, path)
    _read_metrics(run)
    run.summary = public(_mapping(run, "summary.json"))  # runs of earlier versions have secrets there
    run.plan = _mapping(run, "plan.json")
    starts = _mapping(run, "run.json").get("starts", [])
    for start in starts if isinstance(starts, list) else ():
        if isinstance(start, dict):
            command = start.get("command")
            shown = {"command": public_command(command)} if isinstance(command, str) else {}
            run.starts.append(public(start) | shown)
    run.settings = _settings(run)
    for file in path.glob("samples/step_*.jsonl"):
        if file.stem[5:].isdecimal():
            run.samples[int(file.stem[5:])] = file
    return run


def finite(values: np.ndarray) -> np.ndarray:
    """Those that are neither infinite nor NaN."""
    return values[np.isfinite(values)]


def rows_of(run: Run, names: Iterable[str]) -> list[tuple[int, dict[str, float]]]:
    """Each step with its values of these metrics, by step."""
    rows: dict[int, dict[str, float]] = {}
    for name in names:
        column = run.columns[name]
        for step, value in zip(column.steps.tolist(), column.values.tolist(), strict=True):
            rows.setdefault(step, {})[name] = value
    return sorted(rows.items())


def samples_of(run: Run, step: int) -> list[dict[str, Any]]:
    """A validation's samples; lines that cannot be read are noted in `run.unread`."""
    file = run.samples[step]
    found = []
    for line in filter(str.strip, _lines(run, file)):
        sample = _parsed(line)
        if isinstance(sample, dict):
            found.append(sample)
        else:
            run.unread.append(f"{file.relative_to(run.folder)}: a line that is not a JSON object")
    return found


def _read_metrics(run: Run) -> None:
    file = run.folder / "metrics.jsonl"
    if not file.exists():
        return
    run.last_written = file.stat().st_mtime
    records: dict[int, dict[str, Any]] = {}
    wrong = 0
    lines = _lines(run, file)
    for number, line in enumerate(lines, 1):
        record = _parsed(line)
        step: Any = record.get("step") if isinstance(record, dict) else None
        if type(step) in (int, float) and abs(step) <= LARGEST_STEP:
            records.setdefault(int(step), {}).update(record)
        elif number < len(lines):
            wrong += 1  # the last line may be incomplete: the run is in progress, or was killed
    if wrong:
        run.unread.append(f"metrics.jsonl: {wrong} of {len(lines)} lines are not valid records")
    steps = sorted(records)
    run.missing_steps = steps[-1] - steps[0] + 1 - len(steps) if steps else 0
    run.columns = _columns(steps, records)


def _columns(steps: list[int], records: Mapping[int, Mapping[str, Any]]) -> dict[str, MetricColumn]:
    found: dict[str, tuple[list[int], list[float], list[float]]] = defaultdict(lambda: ([], [], []))
    seconds = 0.0
    for step in steps:
        record = records[step]
        seconds = max(seconds, _finite(record.get("seconds")))
        for name, value in record.items():
            number = value if type(value) is float else _number(value)
            if number is None:
                continue
            ats, times, values = found[name]
            ats.append(step)
            times.append(seconds)
            values.append(number)
    return {
        name: MetricColumn(np.array(at, dtype=np.int64), np.array(times), np.array(values, dtype=np.float64))
        for name, (at, times, values) in found.items()
        if name not in ("step", "seconds")
    }


def _number(value: Any) -> float | None:
    """A number, or a string for one that JSON lacks (NaN, infinity); None: neither."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _finite(value: Any) -> float:
    """A number that can be drawn; 0 for anything else."""
    number = _number(value)
    return number if number is not None and math.isfinite(number) else 0.0


def _settings(run: Run) -> dict[str, tuple[str, str]]:
    """From config_origins.json, with every key's origin; else from config.yaml, which has only values."""
    facts = _mapping(run, "config_origins.json")
    origins = {key: fact for key, fact in facts.items() if isinstance(fact, dict)}
    rows = [(key, fact.get("value"), str(fact.get("from", ""))) for key, fact in origins.items()]
    if not facts:
        rows = [(key, value, "") for key, value in flat(_yaml(run))]
    return {key: (as_text(public(value, key)), origin) for key, value, origin in rows}


def _yaml(run: Run) -> dict[str, Any]:
    file = run.folder / "config.yaml"
    if not file.exists():
        return {}
    import yaml  # a tenth of a second that most reports do not need

    try:
        text = file.read_text(encoding="utf-8", errors="replace")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            # a few aliases can expand to more than a page can hold
            raise ValueError("has YAML aliases (*name), which no run writes")
        found = yaml.safe_load(text)
        if depth(found) > DEEPEST:
            raise ValueError(f"is nested deeper than {DEEPEST} levels")
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        run.unread.append(f"config.yaml: {first_line(error)}")
        return {}
    return found if isinstance(found, dict) else {}


def as_text(value: object) -> str:
    """Text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _mapping(run: Run, name: str) -> dict[str, Any]:
    """A JSON object of the run folder; empty if it is missing or unreadable."""
    file = run.folder / name
    if not file.exists():
        return {}
    text = "\n".join(_lines(run, file))
    found = _parsed(text)
    if isinstance(found, dict) and depth(found) <= DEEPEST:
        return found
    run.unread.append(f"{name}: {'is not a JSON object of a run' if text.strip() else 'is empty'}")
    return {}


def _lines(run: Run, file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        run.unread.append(f"{file.relative_to(run.folder)}: {error.strerror}")
        return []


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
