"""What stands in for Ray's agents."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import ray
from ray._raylet import (
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    get_port_filename,
)

from hydraflow.dispatch import agent
from hydraflow.dispatch.processes import own_ray_processes

NODE_ID = "0" * 56
NODE = """
import subprocess, sys
print(subprocess.Popen([sys.executable, *sys.argv[1:]]).pid, flush=True)
sys.stdin.read()
"""


def test_it_writes_where_ray_looks_and_ends_with_its_parent(tmp_path: Path) -> None:
    names = (METRICS_AGENT_PORT_NAME, METRICS_EXPORT_PORT_NAME, DASHBOARD_AGENT_LISTEN_PORT_NAME)
    files = [tmp_path / get_port_filename(NODE_ID, name) for name in names]
    words = ["-I", "-S", agent.__file__, agent.DASHBOARD, "Ray's own", f"--node-id={NODE_ID}"]
    words += [f"--session-dir={tmp_path}", "--node-ip-address=127.0.0.1", "--minimal"]
    with subprocess.Popen(
        [sys.executable, "-c", NODE, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as node:
        assert node.stdin is not None and node.stdout is not None
        started = psutil.Process(int(node.stdout.readline()))
        deadline = time.monotonic() + 30
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline and started.is_running()
            time.sleep(0.02)
        assert [file.read_text() for file in files] == ["-1"] * 3
        assert set(tmp_path.iterdir()) == set(files)
        node.stdin.close()
    started.wait(timeout=30)


RAYS_OWN = """
import pathlib, socket, sys, time
port = int(sys.argv[2].partition("=")[2])
pathlib.Path("started").write_text(sys.path[0])
time.sleep(0.2)  # imports
other = socket.socket()
other.bind(("127.0.0.1", 0))
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", port))
listener.listen()
client = listener.accept()[0]
client.sendall(client.recv(100) + sys.argv[3].encode())
"""


def test_rays_own_agent_starts_with_the_first_request(tmp_path: Path) -> None:
    """The request waits for it, and nobody else can have the port."""
    file = tmp_path / get_port_filename(NODE_ID, RUNTIME_ENV_AGENT_PORT_NAME)
    (tmp_path / "agent.py").write_text(RAYS_OWN)
    words = ["--node-ip-address=127.0.0.1", "--runtime-env-agent-port=0"]
    words += [f"--session-dir={tmp_path}", f"--node-id={NODE_ID}"]
    command = [sys.executable, "-u", str(tmp_path / "agent.py"), *words]
    ours = [sys.executable, "-I", "-S", agent.__file__, agent.RUNTIME_ENV]
    with subprocess.Popen([*ours, *command], cwd=tmp_path) as started, ExitStack() as ends:
        ends.callback(started.kill)
        deadline = time.monotonic() + 30
        while not file.exists():
            assert time.monotonic() < deadline and started.poll() is None
            time.sleep(0.02)
        place = ("127.0.0.1", int(file.read_text()))
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(place)
        time.sleep(0.2)
        assert not (tmp_path / "started").exists()
        with socket.create_connection(place, timeout=30) as client:
            client.sendall(b"asked ")
            assert client.recv(100).decode() == f"asked {words[2]}"
        assert (tmp_path / "started").read_text() == str(tmp_path), "it imports its own modules"
        assert started.wait(30) == 0


WAITS = "import pathlib, time; pathlib.Path('started').touch(); time.sleep(300)"


@pytest.mark.parametrize("requested", [False, True])
def test_it_ends_with_a_node_process_that_is_killed(tmp_path: Path, requested: bool) -> None:
    file = tmp_path / get_port_filename(NODE_ID, RUNTIME_ENV_AGENT_PORT_NAME)
    (tmp_path / "agent.py").write_text(WAITS)
    options = ["--node-ip-address=127.0.0.1", "--runtime-env-agent-port=0"]
    options += [f"--session-dir={tmp_path}", f"--node-id={NODE_ID}"]
    words = ["-I", "-S", agent.__file__, agent.RUNTIME_ENV, sys.executable, str(tmp_path / "agent.py")]
    with subprocess.Popen(
        [sys.executable, "-c", NODE, *words, *options],
        cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as node:  # fmt: skip
        assert node.stdout is not None
        started = psutil.Process(int(node.stdout.readline()))
        deadline = time.monotonic() + 30
        while not file.exists():
            assert time.monotonic() < deadline and started.is_running()
            time.sleep(0.02)
        if requested:
            socket.create_connection(("127.0.0.1", int(file.read_text()))).close()
            while not (tmp_path / "started").exists():
                assert time.monotonic() < deadline and started.is_running()
                time.sleep(0.02)
        node.kill()
    started.wait(timeout=30)


def command_lines() -> list[list[str]]:
    return [process.cmdline() for process in own_ray_processes()]


@pytest.mark.usefixtures("ray_session")
def test_a_local_ray_has_it_and_no_agent_of_rays_dashboard() -> None:
    lines = command_lines()
    assert sum(line[1:5] == ["-I", "-S", agent.__file__, agent.DASHBOARD] for line in lines) == 1, lines
    assert not any(line and "DashboardAgent" in line[0] for line in lines), lines


@pytest.mark.usefixtures("ray_session")
def test_a_worker_with_a_runtime_environment_gets_it() -> None:
    @ray.remote(num_cpus=0)
    def seen() -> str:
        return os.environ["OF_THE_TEST"]

    given = {"env_vars": {"OF_THE_TEST": "yes"}}
    assert ray.get(seen.options(runtime_env=given).remote(), timeout=120) == "yes"
    assert any(line and "RuntimeEnvAgent" in line[0] for line in command_lines())
