"""The run folder, which holds everything that a run writes.

In: trainer.default_local_dir or the experiment's name. Out: a folder that can be written, the paths inside
it, config.yaml, summary.json, samples and the requeue note. Left out on purpose: the files of other
modules (metrics, plan, models, checkpoints); they get their paths here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from hydraflow.errors import ConfigError, EnvironmentFault
from hydraflow.redact import fingerprinted
from hydraflow.system.paths import expanded, require_home
from hydraflow.system.whole_files import json_object, make_earlier, prove_writable, replacing
from hydraflow.tracking.file import METRICS_FILE, json_number
from hydraflow.tracking.history import record_of
from hydraflow.tracking.run_lock import FIELD, LOCK_FILE
from hydraflow.tracking.summary import Summary

logger = logging.getLogger(__name__)

RUNS = Path("runs")
"""Parent of run folders that the user did not name."""
RUN_FILES = (
    METRICS_FILE,
    "config.yaml",
    "config_origins.json",
    "plan.json",
    "run.json",
    "summary.json",
    "curve.png",
    "tensorboard",
    "wandb",
    "mlflow",
    "swanlab",
    "samples",
    "skipped",
    "warm_start",
    "requeue",
    "code",
    "logs",
    "stacks",
    "profile",
    "report.html",
    "final_model",
    "latest_checkpointed_iteration.txt",
    "global_step_*",
    "best",
)
"""Patterns of files that belong to a single run and must not be mixed with those of an earlier run in the
same folder."""
_MARKS = (LOCK_FILE, "run.json", METRICS_FILE, "summary.json", "logs/controller-0.log")
"""One of these is in every folder that a run has used."""


class RunFolder:
    """A folder that exists and can be written."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics = path / METRICS_FILE
        self.config = path / "config.yaml"
        self.config_origins = path / "config_origins.json"
        self.plan = path / "plan.json"
        self.run = path / "run.json"
        self.summary = path / "summary.json"
        self.curve = path / "curve.png"
        self.final_model = path / "final_model"
        self.samples = path / "samples"
        self.skipped = path / "skipped"
        self.requeue = path / "requeue"
        self.code = path / "code"

    @classmethod
    def make(cls, directory: str | None, experiment_name: str) -> RunFolder:
        """Creates `directory`, or runs/<experiment_name>-<date>-<time> if it is None; existing files stay.

        Raises ConfigError when it cannot be written.
        """
        stamped = f"{slug(experiment_name)}-{datetime.now():%Y%m%d-%H%M%S}"
        path = expanded(directory) if directory else RUNS / stamped
        try:
            if directory:
                path.mkdir(parents=True, exist_ok=True)
            else:
                path = _make_unused(path)
            prove_writable(path)
        except OSError as error:
            raise _unwritable(path, error) from error
        return cls(path.resolve())

    @classmethod
    def of_experiment(cls, experiment_name: str) -> list[RunFolder]:
        """The folders that `make` created for this experiment, the newest first."""
        pattern = re.compile(re.escape(slug(experiment_name)) + r"-\d{8}-\d{6}(-\d+)?")
        found = [path for path in RUNS.glob("*") if pattern.fullmatch(path.name) and path.is_dir()]
        return [cls(path.resolve()) for path in sorted(found, key=lambda path: path.name, reverse=True)]

    def was_used(self) -> bool:
        """Whether a run has used it; to be asked before it is locked."""
        return any((self.path / mark).exists() for mark in _MARKS)

    def require_movable(self, values: Mapping[str, Any], *, used: bool) -> None:
        """Raises ConfigError if `move_earlier_run` would move files that are not of a run, or that this run
        reads. `values`: those of the configuration, by key; `used`: see `was_used`."""
        moved = self._leftovers()
        if moved and not used:
            names = ", ".join(path.name for path in moved)
            rule = f"holds {names}, which no run of hydraflow wrote and this run would move away"
            raise ConfigError.one(FIELD, self.path, rule, f"{FIELD}=<a folder for this run>")
        for key, value in values.items():
            for path in _paths_in(value):
                if any(path.resolve().is_relative_to(each) for each in moved):
                    rule = f"is in the run folder, whose earlier run would be moved ({FIELD}={self.path})"
                    raise ConfigError.one(key, path, rule, f"{FIELD}=<another folder>")

    def _leftovers(self) -> list[Path]:
        return sorted(path for name in RUN_FILES for path in self.path.glob(name))

    def move_earlier_run(self) -> None:
        """Moves files of an earlier run to earlier-1/, earlier-2/, ... Raises ConfigError when that fails."""
        leftovers = self._leftovers()
        if not leftovers:
            return
        try:
            aside = make_earlier(self.path)
            for leftover in leftovers:
                leftover.rename(aside / leftover.name)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def go_back_to(self, step: int) -> int:
        """Deletes the records of steps after `step`, which will be repeated, and of how the run ended;
        returns the number of lines deleted from metrics.jsonl."""
        self.summary.unlink(missing_ok=True)
        self.requeue.unlink(missing_ok=True)
        for file in [*self.samples.glob("step_*.jsonl"), *self.skipped.glob("step_*.safetensors")]:
            number = re.match(r"step_(\d+)(?:_|$)", file.stem)  # files of other names are the user's
            if number and int(number[1]) > step:
                file.unlink()
        if not self.metrics.exists():
            return 0
        lines = self.metrics.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        records = [record_of(line) for line in lines]
        if torn := records[:-1].count(None):  # a torn last line is normal after an interrupt
            logger.warning("%s: %d of %d lines are torn; they are dropped", self.metrics, torn, len(lines))
        both = zip(lines, records, strict=True)
        kept = [line for line, record in both if record and record["step"] <= step]
        self._write(self.metrics, "".join(kept))
        return len(lines) - len(kept)

    def ended_with(self) -> tuple[str, int]:
        """Why the last run there ended, and after how many steps; empty and 0 if unknown."""
        summary = json_object(self.summary) or {}
        why, steps = summary.get("why_it_ended"), summary.get("steps")
        return (why, steps) if isinstance(why, str) and isinstance(steps, int) else ("", 0)

    @staticmethod
    def prove_writable(directory: str | None, field: str = FIELD) -> None:
        """Raises ConfigError if `make` could not create that folder; leaves nothing behind. `field`: the key
        that names it."""
        if directory and "://" in directory:
            rule = "is an address; only folders of a file system can be written"
            raise ConfigError.one(
                field, directory, rule, f"{field}=<a folder, or where the address is mounted>"
            )
        if directory:
            require_home(directory, field)
        path = expanded(directory) if directory else RUNS
        try:
            prove_writable(path)
        except OSError as error:
            raise _unwritable(path, error, field) from error

    def note_start(self, facts: Mapping[str, Any]) -> None:
        """Adds a start of the run, with its provenance, to run.json (`provenance.facts_of_start`)."""
        text = json.dumps({"starts": [*self.starts(), dict(facts)]}, indent=1, ensure_ascii=False)
        self._write(self.run, text + "\n", private=True)

    def keep_code(self, files: Mapping[str, Path]) -> dict[str, dict[str, str]]:
        """Copies the user's files to code/, each under its name and the start of its SHA-256; returns their
        entries for run.json. Copies of earlier starts are kept, and a changed file is logged as a warning.
        `files`: the configuration key of each."""
        found: dict[str, dict[str, str]] = {}
        starts = self.starts()
        before: dict[str, dict[str, str]] = starts[-1].get("code", {}) if starts else {}
        for key, path in files.items():
            content = path.read_bytes()
            sha256 = hashlib.sha256(content).hexdigest()
            copy = self.code / f"{path.stem}-{sha256[:8]}{path.suffix}"
            self.code.mkdir(exist_ok=True)
            copy.write_bytes(content)
            found[key] = {"path": str(path), "sha256": sha256, "copy": f"{self.code.name}/{copy.name}"}
            if key in before and before[key]["sha256"] != sha256:
                text = "%s: %s has changed since this run last started; the earlier version is %s"
                logger.warning(text, key, path, self.path / before[key]["copy"])
        return found

    def starts(self) -> list[dict[str, Any]]:
        """The starts in run.json, the oldest first."""
        found = (json_object(self.run) or {}).get("starts")
        return found if isinstance(found, list) else []

    def write_config(self, config: Mapping[str, Any], origins: Mapping[str, str]) -> None:
        """Writes the whole configuration, as plain dicts, lists and scalars, to config.yaml: `--config-dir
        <this folder> --config-name config` runs it again, so it includes the user's secrets. Also writes
        config_origins.json: each key of `origins` with its origin and its value, without secrets."""
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        self._write(self.config, text, private=True)
        facts = {}
        for key, origin in origins.items():
            value = reduce(lambda section, name: section[name], key.split("."), config)
            facts[key] = {"value": fingerprinted(value, key), "from": origin}
        self._write(self.config_origins, json.dumps(facts, indent=1, ensure_ascii=False) + "\n", private=True)

    def write_plan(self, text: str) -> None:
        self._write(self.plan, text)

    def write_summary(self, summary: Summary) -> None:
        """Writes summary.json atomically."""
        fields = asdict(summary)
        fields |= {name: json_number(value) for name, value in fields.items() if isinstance(value, float)}
        self._write(self.summary, json.dumps(fields, indent=2, allow_nan=False) + "\n")

    def write_requeue(self, step: int, why: str) -> None:
        """Writes `requeue`, the note that the run was asked to stop and that the same command resumes it."""
        self._write(self.requeue, json.dumps({"step": step, "why": why}) + "\n")

    def write_samples(self, step: int, samples: Iterable[Mapping[str, object]]) -> None:
        """Writes validation samples, one JSON object a line, to samples/step_<step>.jsonl; a warning if
        that fails."""
        lines = [json.dumps(dict(sample), ensure_ascii=False, default=str) + "\n" for sample in samples]
        try:
            self.samples.mkdir(exist_ok=True)
            self._write(self.samples / f"step_{step:06d}.jsonl", "".join(lines))
        except (OSError, EnvironmentFault) as error:
            logger.warning("the samples of step %d are lost: %s", step, error)

    def _write(self, path: Path, text: str, *, private: bool = False) -> None:
        """Writes under a temporary name and renames. `private`: only this user can read it, because it may
        hold secrets: no rule recognises every secret."""
        try:
            with replacing(path) as unfinished:
                if private:
                    unfinished.touch(mode=0o600)
                # replace: the user's data may hold a lone surrogate, which UTF-8 cannot encode
                unfinished.write_text(text, encoding="utf-8", errors="replace")
        except OSError as error:
            raise EnvironmentFault(f"cannot write {path}: {error.strerror}") from error


def _paths_in(value: Any) -> Iterator[Path]:
    """The existing files and folders that a value names."""
    if isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _paths_in(each)
    elif isinstance(value, str) and value:
        path = expanded(value.rpartition(":")[0] if ".py:" in value else value)
        with suppress(OSError, ValueError):  # too long, or with a null character
            if path.exists():
                yield path


def _unwritable(path: Path, error: OSError, field: str = FIELD) -> ConfigError:
    rule = f"{'the run folder' if field == FIELD else 'the folder'} cannot be written ({error.strerror})"
    return ConfigError.one(field, path, rule, f"{field}=<a folder that you may write to>")


def slug(name: str) -> str:
    """An experiment's name as the name of a folder.

    >>> slug("../my run")
    '..-my-run'
    """
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name) or "run"


def _make_unused(path: Path) -> Path:
    """Makes `path`, or path-2, path-3, ... if another run started in the same second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, candidate = 1, path
    while True:
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            number += 1
            candidate = path.with_name(f"{path.name}-{number}")
