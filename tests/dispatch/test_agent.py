"""What stands in for the agent of Ray's dashboard."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ray._raylet import (
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
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
    words = ["-I", "-S", agent.__file__, "Ray's own", f"--node-id={NODE_ID}", f"--session-dir={tmp_path}"]
    words += ["--node-ip-address=127.0.0.1", "--minimal"]
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


@pytest.mark.usefixtures("ray_session")
def test_a_local_ray_has_it_and_no_agent_of_rays_dashboard() -> None:
    lines = [process.cmdline() for process in own_ray_processes()]
    assert sum(line[1:4] == ["-I", "-S", agent.__file__] for line in lines) == 1, lines
    assert not any(line and "DashboardAgent" in line[0] for line in lines), lines
