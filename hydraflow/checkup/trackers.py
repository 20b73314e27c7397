"""Checks that the run folder can be written and that each tracker of trainer.logger can be used.

In: `trainer.logger`. Out: findings, one per tracker. A new tracker is a line in `TRACKER_CHECKS`.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from hydraflow.batch_plan.settings import value_at
from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import Finding, of_problem, ok, problem, warning
from hydraflow.errors import ConfigError
from hydraflow.redact import public_text
from hydraflow.system.paths import expanded
from hydraflow.tracking import mlflow, swanlab, wandb
from hydraflow.tracking.base import RunInfo
from hydraflow.tracking.run_folder import RunFolder
from hydraflow.tracking.trackers import TRACKERS
from hydraflow.trainer.config import LoopConfig

ON_SERVERS = ("wandb", "mlflow", "swanlab")
"""Trackers on a server, which a check must not fill with test runs."""
CONNECT_SECONDS = 2.0


def check_trackers(context: CheckContext) -> Iterator[Finding]:
    """Checks each tracker of the run, always including the file; then the folders that responses are saved
    to."""
    trainer = context.config.trainer
    yield from look_at(trainer)
    for key in ("trainer.rollout_data_dir", "trainer.validation_data_dir", "trainer.debug.save_rollouts"):
        folder: Any = value_at(trainer, key.removeprefix("trainer."))
        if folder is not None:
            yield _writable(folder, f"{key}: {expanded(folder)} can be written", key)


def look_at(trainer: LoopConfig) -> Iterator[Finding]:
    """Checks each tracker of a training command."""
    for name in dict.fromkeys(["file", *trainer.logger]):
        yield TRACKER_CHECKS[name](trainer)


def check_writing(context: CheckContext) -> Iterator[Finding]:
    """Logs one number with each tracker that writes files, in a temporary folder."""
    for name in dict.fromkeys(["file", *context.config.trainer.logger]):
        if name in ("console", *ON_SERVERS):
            continue
        with tempfile.TemporaryDirectory() as folder:
            tracker = TRACKERS[name](RunInfo(Path(folder), "doctor", total_steps=1))
            tracker.log({"doctor": 1.0}, step=1)
            tracker.close()
            size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        took = f"{name} logged a number and wrote"
        yield ok(f"{took} {size} bytes") if size else problem(f"{took} nothing")


def _check_file(trainer: LoopConfig) -> Finding:
    folder = expanded(trainer.default_local_dir or "runs")
    return _writable(trainer.default_local_dir, f"metrics.jsonl goes to {folder}, which can be written")


def _writable(directory: str | None, seen: str, *key: str) -> Finding:
    try:
        RunFolder.prove_writable(directory, *key)
    except ConfigError as error:
        return of_problem(error.problems[0])
    return ok(seen)


def _check_login(name: str, trainer: LoopConfig) -> Finding:
    remedy = f"{name} login, or {name.upper()}_API_KEY=..., or {name.upper()}_MODE=offline"
    offline_because = {"wandb": wandb, "swanlab": swanlab}[name].offline_because
    missing = _missing(name, trainer, f"pip install 'hydraflow-trainer[{name}]'")
    return missing or judge_login(name, offline_because(os.environ), remedy)


def judge_login(name: str, offline: str | None, remedy: str) -> Finding:
    """`offline`: why the run is kept in its folder; None: it is sent. Offline on request is fine; otherwise
    it is a warning, and the run starts."""
    if offline is None:
        return ok(f"{name} is installed, and a user is logged in")
    if "=" in offline:
        return ok(f"{name} is installed; {offline}")
    kept = f"the run is kept offline in <run folder>/{name}, and `{name} sync` uploads it later"
    return warning(f"{name} is installed, but {offline}: {kept}", remedy)


def _check_mlflow(trainer: LoopConfig) -> Finding:
    missing = _missing("mlflow", trainer, "pip install 'hydraflow-trainer[mlflow]'")
    return missing or judge_mlflow(os.environ, without=_without("mlflow", trainer))


def judge_mlflow(environ: Mapping[str, str], *, without: str) -> Finding:
    """Whether MLFLOW_TRACKING_URI can be used. `without`: the override that leaves MLflow out."""
    folder = Path("<run folder>")
    address = mlflow.tracking_uri(environ, folder)
    uri, scheme = public_text(address), urlsplit(address).scheme
    if scheme in ("http", "https"):
        reason = _silent(address)
        if reason is None:
            return ok(f"mlflow is installed, and a server answers at {uri}")
        evidence = f"{mlflow.URI}={uri}: nothing answers there ({reason})"
        return problem(evidence, f"start it, or unset {mlflow.URI}, or {without}")
    if scheme in ("", "file") and environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("1", "true"):
        rule = f"{mlflow.URI}={uri}: MLflow no longer supports stores of plain files"
        other = f"{mlflow.URI}=sqlite:////path/mlflow.db, or MLFLOW_ALLOW_FILE_STORE=true"
        return problem(rule, f"{other}, or {without}")
    needed = ("sqlalchemy", "alembic") if scheme.startswith("sqlite") else ()
    if lacking := [name for name in needed if importlib.util.find_spec(name) is None]:
        rule = f"mlflow is installed, but not {' and '.join(lacking)}, which {uri} needs"
        return problem(rule, "pip install 'hydraflow-trainer[mlflow]'")
    return ok(f"mlflow is installed; runs go to {uri}")


def _silent(uri: str) -> str | None:
    """Why nothing listens at an address, or at the proxy that leads to it; None: something does."""
    address = urlsplit(uri)
    try:
        proxy = getproxies().get(address.scheme)
        if proxy and not proxy_bypass(address.hostname or ""):
            address = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _missing(name: str, trainer: LoopConfig, install: str) -> Finding | None:
    """A problem if the tracker's package is not installed; None if it is."""
    if importlib.util.find_spec(name) is not None:
        return None
    remedy = f"{install}, or {_without(name, trainer)}"
    return problem(f"trainer.logger has {name}, which is not installed", remedy)


def _without(name: str, trainer: LoopConfig) -> str:
    return f"trainer.logger=[{','.join(other for other in trainer.logger if other != name)}]"


TRACKER_CHECKS: dict[str, Callable[[LoopConfig], Finding]] = {
    "file": _check_file,
    "tensorboard": lambda trainer: (
        _missing("tensorboard", trainer, "pip install tensorboard") or ok("tensorboard is installed")
    ),
    "wandb": partial(_check_login, "wandb"),
    "mlflow": _check_mlflow,
    "swanlab": partial(_check_login, "swanlab"),
    "console": lambda trainer: ok("the console needs nothing"),
}
"""Name in trainer.logger -> the check of what it needs."""
