"""The time that Ray's own start gives a raylet."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private import services as rays

from hydraflow.dispatch import services
from hydraflow.dispatch.services import without_services


@pytest.fixture
def raylet(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of that name which never registers."""
    program = shutil.which("sleep")
    assert program is not None
    shutil.copy(program, tmp_path / "raylet")
    with subprocess.Popen([tmp_path / "raylet", "60"]) as process:
        yield process
        process.kill()


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


def test_a_slow_raylet_is_waited_for(raylet: subprocess.Popen[bytes], asked: list[str]) -> None:
    before = rays.get_node
    with without_services(log_monitor=False):
        assert rays.get_node("host:1", "a") == {"node_id": "a"}
    assert asked == ["a"] * 3 and rays.get_node is before


def test_the_wait_has_a_limit(
    raylet: subprocess.Popen[bytes], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "START_SECONDS", 0.0)
    with without_services(log_monitor=False), pytest.raises(RuntimeError, match="not registered"):
        rays.get_node("host:1", "a")
    assert len(asked) < 3


def test_a_raylet_that_has_died_is_not_waited_for(raylet: subprocess.Popen[bytes], asked: list[str]) -> None:
    raylet.kill()
    os.waitid(os.P_PID, raylet.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie
    with without_services(log_monitor=False), pytest.raises(RuntimeError, match="not registered"):
        rays.get_node("host:1", "a")
    assert len(asked) < 3
