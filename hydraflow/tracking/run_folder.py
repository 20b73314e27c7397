"""The run folder: everything that a run leaves behind is in it.

In: trainer.default_local_dir or the experiment's name. Out: a folder that can be written, the paths inside it, config.yaml,
summary.json and samples. Left out on purpose: what others write there (metrics, plan, models); they ask here for the path.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from hydraflow.errors import ConfigError, EnvironmentFault
from hydraflow.tracking.file import METRICS_FILE, json_number
from hydraflow.tracking.summary import Summary

FIELD = "trainer.default_local_dir"
RUN_FILES = (METRICS_FILE, "config.yaml", "plan.json", "summary.json", "curve.png", "tensorboard", "samples", "warm_start")
"""What belongs to one run alone, and must not be mixed with an earlier one's in the same folder."""


class RunFolder:
    """A folder that exists and can be written."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics = path / METRICS_FILE
        self.config = path / "config.yaml"
        self.plan = path / "plan.json"
        self.summary = path / "summary.json"
        self.curve = path / "curve.png"
        self.final_model = path / "final_model"
        self.samples = path / "samples"

    @classmethod
    def create(cls, directory: str | None, experiment_name: str) -> RunFolder:
        """Makes `directory`, or runs/<experiment_name>-<date>-<time> when it is None.

        Files that an earlier run left there go to earlier-1/, earlier-2/, ... Raises ConfigError when it cannot be written.
        """
        path = Path(directory).expanduser() if directory else Path("runs") / _stamped(experiment_name)
        try:
            path = _make(path) if directory else _make_unused(path)
            _write_something(path)
            _set_earlier_run_aside(path)
        except OSError as error:
            raise _unwritable(path, error) from error
        return cls(path.resolve())

    @staticmethod
    def prove_writable(directory: str | None) -> None:
        """Raises ConfigError when `create` could not make that folder; leaves nothing behind."""
        path = Path(directory).expanduser() if directory else Path("runs")
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        try:
            _write_something(existing)
        except OSError as error:
            raise _unwritable(path, error) from error

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes the whole configuration, as plain dicts, lists and scalars, to config.yaml."""
        self._write(self.config, yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))

    def write_summary(self, summary: Summary) -> None:
        """Writes summary.json: a reader sees the whole file or none."""
        fields = {name: json_number(value) if isinstance(value, float) else value for name, value in asdict(summary).items()}
        self._write(self.summary, json.dumps(fields, indent=2, allow_nan=False) + "\n")

    def write_samples(self, step: int, samples: Iterable[Mapping[str, object]]) -> None:
        """Writes validation samples, one JSON object a line, to samples/step_<step>.jsonl."""
        self.samples.mkdir(exist_ok=True)
        lines = [json.dumps(dict(sample), ensure_ascii=False) + "\n" for sample in samples]
        self._write(self.samples / f"step_{step:06d}.jsonl", "".join(lines))

    def _write(self, path: Path, text: str) -> None:
        """Writes under a temporary name and renames."""
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            raise EnvironmentFault(f"cannot write {path}: {error.strerror}") from error


def _write_something(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder):
        pass


def _unwritable(path: Path, error: OSError) -> ConfigError:
    rule = f"the run folder cannot be written ({error.strerror})"
    return ConfigError.one(FIELD, path, rule, f"{FIELD}=<a folder that you may write to>")


def _stamped(name: str) -> str:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name) or 'run'}-{stamp}"


def _make(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _make_unused(path: Path) -> Path:
    """Makes `path`, or path-2, path-3, ... where a run began in the same second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, candidate = 1, path
    while True:
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            number += 1
            candidate = path.with_name(f"{path.name}-{number}")


def _set_earlier_run_aside(path: Path) -> None:
    leftovers = [path / name for name in RUN_FILES if (path / name).exists()]
    if not leftovers:
        return
    aside = next(folder for number in count(1) if not (folder := path / f"earlier-{number}").exists())
    aside.mkdir()
    for leftover in leftovers:
        leftover.rename(aside / leftover.name)
