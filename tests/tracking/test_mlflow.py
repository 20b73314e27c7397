"""MLflow with its SQLite store: what its own client reads back is what was logged."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tracking.samples import ACCURACY, SAMPLES, about

from hydraflow.tracking.base import RunInfo
from hydraflow.tracking.trackers import open_trackers

pytestmark = [
    pytest.mark.slow(short=True),
    pytest.mark.skipif(
        find_spec("mlflow") is None or find_spec("sqlalchemy") is None,
        reason="mlflow is not installed: pip install -c constraints.txt -e '.[dev]'",
    ),
]
NAME = "val-core/sums/acc/mean_at_1"


@pytest.fixture(autouse=True)
def _no_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def only_run(uri: str) -> tuple[Any, Any]:
    """A client, and the one run of the experiment."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("sums")
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def artifacts_of(folder: Path, run: Any) -> Path:
    return folder / "mlflow" / "artifacts" / str(run.info.run_id) / "artifacts"


def test_a_run_that_goes_on_is_one_run_with_its_curve_table_and_configuration(tmp_path: Path) -> None:
    for done, steps, failed in ((0, (1, 2, 3), True), (2, (3, 4), False)):
        known = RunInfo(tmp_path, run_id="ppo-'1", done_steps=done, about=about(tmp_path))
        trackers = open_trackers(["mlflow"], known)
        for step in steps:
            trackers.log({ACCURACY: step / 4, "nan": math.nan}, step)
        trackers.log_samples(SAMPLES, steps[-1])
        trackers.close(failed=failed)
    uri = f"sqlite:///{tmp_path}/mlflow/mlflow.db"
    client, run = only_run(uri)
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    points = client.get_metric_history(run.info.run_id, NAME)
    assert sorted({(point.step, point.value) for point in points}) == [
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
        (4, 1.0),
    ]
    assert (run.data.params["trainer.seed"], run.data.params["trainer.max_wall_time"]) == ("3", "None")
    assert run.data.tags["start.git.commit"] == "abc"
    artifacts = artifacts_of(tmp_path, run)
    assert {path.name for path in artifacts.iterdir()} >= {"plan.json", "run.json", "validation"}
    table = json.loads((artifacts / "validation" / "step_000004.json").read_text())
    assert table["columns"] == ["input", "output", "score", "ground_truth"]
    assert table["data"][1] == ["1+1=", SAMPLES[1]["output"], 0.0, ""]


def test_two_runs_share_the_store_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/shared.db")
    monkeypatch.chdir(tmp_path)  # where MLflow keeps the files of a store that has no place for them
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        with open_trackers(["mlflow"], RunInfo(folder, run_id=name, about=about(folder))) as trackers:
            trackers.log({"loss": 1.0}, 1)
        assert not (folder / "mlflow").exists()
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/shared.db")
    runs = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert sorted(run.data.tags["hydraflow.run_id"] for run in runs) == ["a", "b"]


def test_names_and_rows_that_mlflow_would_refuse(tmp_path: Path) -> None:
    """A name that could be another path, or is too long, would cost the numbers beside it; a table's columns
    have one type."""
    from dataclasses import replace

    long = "val-core/" + "x" * 300
    asked = replace(
        about(tmp_path), config={"reward": {"a(b)": 1, "": 2, "..": 3}}, facts={"versions": {"//": "1"}}
    )
    with open_trackers(["mlflow"], RunInfo(tmp_path, run_id="x", about=asked)) as trackers:
        trackers.log({"val-core//acc": 0.5, "val-core/./../x": 0.5, long: 0.25, "loss": 1.0}, 1)
        trackers.log_samples(
            [
                {"input": 1, "output": "a", "score": 1, "ground_truth": 5},
                {"score": None, "ground_truth": ["x"]},
            ],
            1,
        )
    client, run = only_run(f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    assert run.data.metrics == {"val-core/_/acc": 0.5, "val-core/_/_/x": 0.5, long[:250]: 0.25, "loss": 1.0}
    assert run.data.params == {"reward.a_b_": "1", "reward.": "2", "reward...": "3"}
    table = json.loads((artifacts_of(tmp_path, run) / "validation" / "step_000001.json").read_text())
    assert table["data"] == [["1", "a", 1.0, "5"], ["", "", None, "['x']"]]


def test_a_folder_that_no_address_can_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hydraflow.tracking.guarded.PAUSES", ())
    folder = tmp_path / "100%41?"
    with open_trackers(["mlflow"], RunInfo(folder, run_id="x", about=about(tmp_path))) as trackers:
        trackers.log({"loss": 1.0}, 1)
    assert "its database cannot be in" in caplog.text
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["100%41?"], (
        "nothing is beside the run folder"
    )
