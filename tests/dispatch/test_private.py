"""A local cluster belongs to its user: nobody else on the machine reads its secrets or reaches it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hydraflow.dispatch import private
from hydraflow.errors import ConfigError

HERE = Path(__file__).parent
SECRET = "s3cr3t-of-the-run"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def cluster(home: Path) -> Iterator[dict[str, Any]]:
    """A run of another process, while it lives."""
    variables = {"HYDRAFLOW_TEST_SECRET": SECRET, "PYTORCH_JIT": "0"}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environ |= {"HOME": str(home), "PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE.parent}"}
    command = [sys.executable, str(HERE / "local_cluster.py"), json.dumps(variables)]
    with subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        yield json.loads(process.stdout.readline())
        process.stdin.close()
        assert process.wait(timeout=60) == 0


def test_only_this_machine_can_knock(cluster: dict[str, Any]) -> None:
    assert set(cluster["listening"]) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert cluster["worker"]["GLOO_SOCKET_IFNAME"] == "lo", "torch's collectives, too"


def test_token_and_session_are_the_users_alone(cluster: dict[str, Any], home: Path) -> None:
    assert stat.S_IMODE(os.stat(cluster["token"]).st_mode) == 0o600
    assert len(Path(cluster["token"]).read_text()) == 64
    folder = Path(cluster["session"])
    assert any(
        stat.S_IMODE(above.stat().st_mode) == 0o700 and above.name.startswith("hydraflow-")
        for above in folder.parents
    )
    assert not (home / ".ray").exists(), "Ray would write a token there that everybody can read"


def test_variables_reach_the_worker_before_libraries_read_them(cluster: dict[str, Any]) -> None:
    assert cluster["worker"]["HYDRAFLOW_TEST_SECRET"] == SECRET
    assert cluster["worker"]["scripting"] == "False", "torch reads PYTORCH_JIT when it is imported"


def test_variables_are_in_no_log_and_on_no_command_line(cluster: dict[str, Any]) -> None:
    logs = [path for path in Path(cluster["session"]).rglob("*") if path.is_file()]
    assert logs
    assert [path for path in logs if SECRET.encode() in path.read_bytes()] == []
    lines = {
        pid: Path(f"/proc/{pid}/cmdline").read_bytes()
        for pid in cluster["pids"]
        if Path(f"/proc/{pid}").exists()
    }
    assert len(lines) > 5
    # The test gives it the variables on its command line, for want of a configuration file.
    program = cluster["pids"][0]
    assert [pid for pid, line in lines.items() if SECRET.encode() in line and pid != program] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_is_refused_everywhere(cluster: dict[str, Any]) -> None:
    words = [cluster["gcs"], cluster["token"], cluster["session"], str(cluster["pids"][-1])]
    done = subprocess.run(
        [sys.executable, str(HERE / "other_user.py"), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    refused = {
        "token": "no permission",
        "session": "no permission",
        "environment": "no permission",
        "nodes": "UNAUTHENTICATED",
    }
    assert json.loads(done.stdout) == refused


def test_a_token_is_made_once_for_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = private.token_file().read_text()
    assert private.token_file().read_text() == first
    assert [path.name for path in private.token_file().parent.iterdir()] == ["ray-token"]


@pytest.mark.parametrize(
    ("name", "rule"), [("none", "cannot be read: No such file or directory"), ("empty", "the file is empty")]
)
def test_a_named_file_without_a_token(
    name: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").touch()
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / name))
    with pytest.raises(ConfigError, match=f"RAY_AUTH_TOKEN_PATH={tmp_path / name}: .*{rule}"):
        private.close_to_others()


def test_a_token_that_a_cleaner_removed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    private.close_to_others()
    private.token_file().unlink()
    private.close_to_others()  # as a run that restarts in its process
    assert private.token_file().exists()
