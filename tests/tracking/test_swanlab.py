"""SwanLab offline: what is in its file afterwards is what was logged."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from tracking.samples import ACCURACY, SAMPLES, about

from hydraflow.tracking.base import RunInfo
from hydraflow.tracking.swanlab import offline_because
from hydraflow.tracking.trackers import open_trackers

pytestmark = [
    pytest.mark.slow(short=True),
    pytest.mark.skipif(
        find_spec("swanlab") is None,
        reason="swanlab is not installed: pip install -c constraints.txt -e '.[dev]'",
    ),
]


@pytest.fixture(autouse=True)
def _nobody_is_logged_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SWANLAB_API_KEY", "SWANLAB_MODE", "SWANLAB_SAVE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


class Refusing(BaseHTTPRequestHandler):
    """Answers everything with 401."""

    def do_GET(self) -> None:
        """As said."""
        self.send_error(401)

    do_POST = do_PUT = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


def records(folder: Path) -> list[Any]:
    """Everything in the run's file."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    (file,) = folder.glob("swanlab/run-*/*.swanlab")
    reader = DataStoreReader()
    reader.open(file)
    found = []
    for data in reader:
        record = Record()
        record.ParseFromString(data)
        found.append(record)
    return found


def test_metrics_table_and_configuration_are_kept(tmp_path: Path) -> None:
    hook, out = sys.excepthook, sys.stdout
    with open_trackers(["swanlab"], RunInfo(tmp_path, run_id="ppo-1", about=about(tmp_path))) as trackers:
        for step in (1, 2, 3):
            trackers.log({ACCURACY: step / 4}, step)
        trackers.log_samples(SAMPLES, 3)
    assert (sys.excepthook, sys.stdout) == (hook, out), "what SwanLab puts in their place is gone"
    scalars = [record.scalar for record in records(tmp_path) if record.WhichOneof("record_type") == "scalar"]
    assert [(scalar.step, scalar.value.number) for scalar in scalars if scalar.key == ACCURACY] == [
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
    ]
    (table,) = tmp_path.glob("swanlab/run-*/media/echarts/*.json")
    assert json.loads(table.read_text())["rowData"][1]["output"] == SAMPLES[1]["output"]
    (config,) = tmp_path.glob("swanlab/run-*/files/config.yaml")
    kept = yaml.safe_load(config.read_text())
    assert (kept["trainer"]["value"]["seed"], kept["start"]["value"]["git"]["commit"]) == (3, "abc")


def test_a_server_that_lets_nobody_in_means_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hook = sys.excepthook
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("SWANLAB_API_KEY", "no such key")
        monkeypatch.setenv("SWANLAB_API_HOST", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        with open_trackers(["swanlab"], RunInfo(tmp_path, run_id="ppo-1", about=about(tmp_path))) as trackers:
            trackers.log({"loss": 0.5}, 1)
        server.shutdown()
    assert f"The run is kept in {tmp_path}/swanlab" in caplog.text
    assert sys.excepthook is hook
    assert any(
        "loss" in path.read_bytes().decode(errors="replace")
        for path in tmp_path.glob("swanlab/run-*/*.swanlab")
    )


def test_why_a_run_is_kept_offline(tmp_path: Path) -> None:
    home = tmp_path / "somewhere"
    (home / ".swanlab").mkdir(parents=True)
    assert offline_because({"HOME": str(home)}) == "there is no login"
    assert offline_because({"HOME": str(home), "SWANLAB_API_KEY": "k"}) is None
    assert offline_because({"HOME": str(home), "SWANLAB_MODE": "local"}) == "SWANLAB_MODE=local"
    (home / ".swanlab" / ".netrc").write_text("machine api.swanlab.cn login x password y\n")
    assert offline_because({"HOME": str(home)}) is None
