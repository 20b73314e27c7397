"""MLflow: metrics, validation tables, configuration, plan and run.json, on the server of MLFLOW_TRACKING_URI.

In: metrics of a step. Out: a run of the experiment `trainer.project_name`. A resumed run is found by its
tag. Without MLFLOW_TRACKING_URI everything goes to the run folder: `mlflow ui --backend-store-uri
sqlite:///<run folder>/mlflow/mlflow.db`. Left out on purpose: models, which are in the run folder.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydraflow.tracking.base import SAMPLE_COLUMNS, RunInfo, Sample, Tracker, flat, rows_of

URI = "MLFLOW_TRACKING_URI"
TAG = "hydraflow.run_id"
RETRIES = ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
"""Defaults where unset: a dead server is reported within seconds. `guarded.py` retries as well."""
LONGEST_VALUE, MOST_PARAMS, MOST_METRICS = 6000, 100, 1000
LONGEST_NAME = 250
"""MLflow's limits: characters of a parameter's value, parameters and metrics per call, characters of a
name."""


def tracking_uri(environ: Mapping[str, str], folder: Path) -> str:
    """The tracking URI. Raises ValueError for a run folder that a URI cannot express: the store would end up
    elsewhere."""
    if given := environ.get(URI):
        return given
    if set(str(folder)) & set("%?#"):
        rule = f"its URI cannot contain %, ? or #; set {URI}"
        raise ValueError(f"its database cannot be in {folder}: {rule}")
    return f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}"


class MlflowTracker(Tracker):
    """One run of an experiment. Every call is synchronous. Raises what MLflow raises; `guarded.py` wraps
    it."""

    def __init__(self, run: RunInfo):
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        os.environ.setdefault(*RETRIES)
        self._metric: Any = Metric
        self._client: Any = MlflowClient(tracking_uri=tracking_uri(os.environ, run.folder))
        self._id, is_new = self._find_or_make(run, self._experiment(run))
        if is_new:  # MLflow rejects a changed parameter, so those of the first start stay
            values = {key: str(value) for key, value in flat(run.about.config) if str(value)}
            params = [Param(allowed_name(key), text[:LONGEST_VALUE]) for key, text in values.items()]
            for start in range(0, len(params), MOST_PARAMS):
                self._client.log_batch(self._id, params=params[start : start + MOST_PARAMS])
        for key, value in flat(run.about.facts):
            self._client.set_tag(self._id, allowed_name(f"start.{key}"), str(value)[:LONGEST_VALUE])
        for path in run.about.files:
            self._client.log_artifact(self._id, str(path))

    def _experiment(self, run: RunInfo) -> str:
        found = self._client.get_experiment_by_name(run.about.project)
        if found is not None:
            return str(found.experiment_id)
        artifacts = None
        if not os.environ.get(URI):
            (run.folder / "mlflow").mkdir(exist_ok=True)
            artifacts = (run.folder / "mlflow" / "artifacts").as_uri()
        return str(self._client.create_experiment(run.about.project, artifact_location=artifacts))

    def _find_or_make(self, run: RunInfo, experiment: str) -> tuple[str, bool]:
        identity = run.run_id.replace("'", "")
        asked = f"tags.`{TAG}` = '{identity}'"
        found = self._client.search_runs([experiment], filter_string=asked, max_results=1) if identity else []
        if found:
            self._client.update_run(found[0].info.run_id, status="RUNNING")
            return str(found[0].info.run_id), False
        made = self._client.create_run(experiment, run_name=run.about.experiment, tags={TAG: identity})
        return str(made.info.run_id), True

    def log(self, metrics: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        named = ((allowed_name(name), float(value)) for name, value in metrics.items())
        points = [self._metric(name, value, now, step) for name, value in named]
        for start in range(0, len(points), MOST_METRICS):
            self._client.log_batch(self._id, metrics=points[start : start + MOST_METRICS])

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Logs the samples as validation/step_<step>.json, which MLflow shows as a table."""
        columns = dict(zip(SAMPLE_COLUMNS, map(list, zip(*rows_of(samples)))))
        self._client.log_table(self._id, columns, f"validation/step_{step:06d}.json")

    def close(self, *, failed: bool = False) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def allowed_name(name: str) -> str:
    """The name of a metric or parameter in characters that MLflow accepts. No part of it may be empty,
    `.` or `..`: MLflow rejects such a name, and with it everything logged in the same call.

    >>> allowed_name("val-core/sums/acc/mean@4"), allowed_name("val-core/../my (set)//acc")
    ('val-core/sums/acc/mean_at_4', 'val-core/_/my _set_/_/acc')
    """
    parts = re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_")).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)[:LONGEST_NAME].rstrip("/")
