"""The time that Ray's own start gives a raylet."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from ray._private import services as rays

from hydraflow.dispatch import services
from hydraflow.dispatch.services import without_services

Start = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def start_raylet(tmp_path: Path) -> Iterator[Start]:
    """Starts a process of that name which never registers."""
    program = shutil.which("sleep")
    assert program is not None
    shutil.copy(program, tmp_path / "raylet")
    with ExitStack() as started:

        def start() -> subprocess.Popen[bytes]:
            process = started.enter_context(subprocess.Popen([tmp_path / "raylet", "60"]))
            started.callback(process.kill)
            return process

        yield start


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which nodes were asked for; none is registered before the third time."""
    found: list[str] = []

    def get_node(gcs_address: str, node_id: str) -> dict[str, str]:
        found.append(node_id)
        if len(found) < 3:
            raise RuntimeError("not registered")
        return {"node_id": node_id}

    monkeypatch.setattr(rays, "get_node", get_node)
    return found


def test_a_slow_raylet_is_waited_for(start_raylet: Start, asked: list[str]) -> None:
    before = rays.get_node
    with without_services(log_monitor=False):
        start_raylet()
        assert rays.get_node("host:1", "a") == {"node_id": "a"}
    assert asked == ["a"] * 3 and rays.get_node is before


def test_the_wait_has_a_limit(start_raylet: Start, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "START_SECONDS", 0.0)
    with without_services(log_monitor=False):
        start_raylet()
        with pytest.raises(RuntimeError, match="not registered"):
            rays.get_node("host:1", "a")
    assert len(asked) < 3


def test_a_raylet_that_has_died_is_not_waited_for(start_raylet: Start, asked: list[str]) -> None:
    """Another one, of a Ray that this process has started before, runs."""
    start_raylet()
    with without_services(log_monitor=False):
        raylet = start_raylet()
        raylet.kill()
        os.waitid(os.P_PID, raylet.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie
        with pytest.raises(RuntimeError, match="not registered"):
            rays.get_node("host:1", "a")
    assert len(asked) < 3
