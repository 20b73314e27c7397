"""Weights & Biases: what is in its file afterwards, or has come to a server, is what was logged."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tracking.samples import ACCURACY, SAMPLES, about
from tracking.wandb_server import serving

from hydraflow.tracking.base import SAMPLE_TABLE, RunInfo
from hydraflow.tracking.trackers import open_trackers
from hydraflow.tracking.wandb import STEP, WandbTracker, offline_because

pytestmark = [
    pytest.mark.slow(short=True),
    pytest.mark.skipif(
        find_spec("wandb") is None,
        reason="wandb is not installed: pip install -c constraints.txt -e '.[dev]'",
    ),
]


@pytest.fixture(autouse=True)
def _nobody_is_logged_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    import wandb

    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    yield
    wandb.teardown()  # what it read of the environment is forgotten


def records(folder: Path) -> Iterator[Any]:
    """Everything in the offline runs of a run folder, the oldest run first, once W&B's own process has
    written it."""
    import wandb
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    wandb.teardown()
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns):
        store = DataStore()
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            yield record


def history(folder: Path) -> list[dict[str, Any]]:
    """The rows that were logged."""
    rows = [
        record.history.item for record in records(folder) if record.WhichOneof("record_type") == "history"
    ]
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row} for row in rows
    ]


def test_metrics_tables_configuration_and_files_are_kept(tmp_path: Path) -> None:
    with open_trackers(["wandb"], RunInfo(tmp_path, run_id="ppo 1-ff00", about=about(tmp_path))) as trackers:
        for step in (1, 2, 3):
            trackers.log({ACCURACY: step / 4, "actor/lr": 1e-6}, step)
        trackers.log_samples(SAMPLES, 3)
    rows = history(tmp_path)
    assert [(row[STEP], row[ACCURACY]) for row in rows if ACCURACY in row] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/val/*.table.json")
    assert json.loads(table.read_text())["columns"] == ["step", "input", "output", "score", "ground_truth"]
    assert json.loads(table.read_text())["data"][1] == [3, "1+1=", SAMPLES[1]["output"], 0.0, ""]
    assert any(name.startswith(SAMPLE_TABLE) for name in rows[-1])
    run = next(record.run for record in records(tmp_path) if record.WhichOneof("record_type") == "run")
    kept = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert (run.run_id, run.project, run.display_name) == ("ppo-1-ff00", "sums", "first")
    assert (kept["trainer"]["seed"], kept["start"]["git"]["commit"]) == (3, "abc")
    assert {path.name for path in tmp_path.glob("wandb/offline-run-*/files/*.json")} >= {
        "plan.json",
        "run.json",
    }


def test_references_of_several_types_make_a_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A table's columns have one type there: references are text, whatever the data have."""
    samples = [
        {"input": "a", "output": "b", "score": 1.0, "ground_truth": truth} for truth in (5, "x", ["y"], None)
    ]
    with open_trackers(["wandb"], RunInfo(tmp_path, run_id="x", about=about(tmp_path))) as trackers:
        trackers.log_samples([*samples, {"input": "a", "output": "b", "score": None}], 1)
    list(records(tmp_path))
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/val/*.table.json")
    assert [row[4] for row in json.loads(table.read_text())["data"]] == ["5", "x", "['y']", "", ""]
    assert "does not take" not in caplog.text


def test_a_run_that_goes_on_has_the_same_identity_and_a_failure_is_reported(tmp_path: Path) -> None:
    for steps, failed in (((1, 2, 3), False), ((3, 4), True)):
        trackers = open_trackers(["wandb"], RunInfo(tmp_path, run_id="ppo-1", about=about(tmp_path)))
        for step in steps:
            trackers.log({"loss": float(step)}, step)
        trackers.close(failed=failed)
    kinds = [(record.WhichOneof("record_type"), record) for record in records(tmp_path)]
    assert {record.run.run_id for kind, record in kinds if kind == "run"} == {"ppo-1"}
    assert [record.exit.exit_code for kind, record in kinds if kind == "exit"] == [0, 1]
    assert [row[STEP] for row in history(tmp_path)] == [1, 2, 3, 3, 4], "W&B takes a step that is done again"


@pytest.mark.parametrize("failed", [False, True])
def test_what_is_logged_comes_to_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.address)
        trackers = open_trackers(["wandb"], RunInfo(tmp_path, run_id="x", about=about(tmp_path)))
        for step in (1, 2, 3):
            trackers.log({ACCURACY: step / 4}, step)
        trackers.close(failed=failed)
        assert [(row[STEP], row[ACCURACY]) for row in server.rows] == [(1, 0.25), (2, 0.5), (3, 0.75)]
        assert server.exit_code == int(failed)
    assert not list(tmp_path.glob("wandb/offline-*"))


def test_why_a_run_is_kept_offline(tmp_path: Path) -> None:
    home = tmp_path / "somewhere"
    home.mkdir()
    assert offline_because({"HOME": str(home)}) == "there is no login"
    assert offline_because({"HOME": str(home), "WANDB_API_KEY": "k"}) is None
    assert (
        offline_because({"HOME": str(home), "WANDB_API_KEY": "k", "WANDB_MODE": "offline"})
        == "WANDB_MODE=offline"
    )
    (home / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert offline_because({"HOME": str(home)}) is None
    assert (
        offline_because({"HOME": str(home), "WANDB_BASE_URL": "https://wandb.example.org"})
        == "there is no login"
    )
    (home / ".netrc").write_text("machine api.wandb.ai login\n")
    assert offline_because({"HOME": str(home)}) == "there is no login", "a broken file is no login"


def test_the_proxy_is_for_wandb_alone_and_an_unreachable_server_means_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A proxy that lets nobody through is asked for the server; the run is kept in its folder, and the
    environment is as it was."""
    import os
    from dataclasses import replace

    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        threading.Thread(target=_refuse, args=(proxy, asked), daemon=True).start()
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.invalid")
        monkeypatch.setattr("hydraflow.tracking.wandb.INIT_SECONDS", 3.0)
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        run = RunInfo(tmp_path, "", None, run_id="x", about=replace(about(tmp_path), wandb_proxy=address))
        before = dict(os.environ)
        tracker = WandbTracker(run)
        tracker.log({"loss": 1.0}, 1)
        tracker.close()
    assert any(b"wandb.invalid" in request for request in asked)
    assert {name: value for name, value in os.environ.items() if "proxy" in name.lower()} == {
        name: value for name, value in before.items() if "proxy" in name.lower()
    }
    assert "the run is kept in" in caplog.text
    assert [row["loss"] for row in history(tmp_path)] == [1.0]


def _refuse(proxy: socket.socket, asked: list[bytes]) -> None:
    """Answers every request with 403, until the socket is closed."""
    while True:
        try:
            connection, _ = proxy.accept()
        except OSError:
            return
        with connection:
            asked.append(connection.recv(4096))
            connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
