"""A process of Ray's is killed while Ray starts: the command ends soon, says so, and leaves nothing
behind."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from dispatch import programs
from jobs.command import processes_with

from hydraflow.dispatch.guard import RayGuard

PROGRAM = """
import sys, time
from hydraflow.compose.launch import run_guarded
from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.group import Timeouts
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.system.interrupts import command

def work():
    with Runtime(RayInitConfig(), Timeouts(start=60, call=60)) as runtime:
        runtime.start([ResourcePool("pool", [1])])
        print("up", flush=True)
        time.sleep(float(sys.argv[1]))
    return 0

command(lambda: run_guarded(work))
"""
MARK = "HYDRAFLOW_GUARD_TEST"


def family(folder: Path) -> list[psutil.Process]:
    """Living processes of that program: with its mark in their environment, or its forks."""
    found = []
    for pid in processes_with([f"{MARK}={folder}"], cwd=folder):
        with suppress(psutil.Error):
            if (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def named(folder: Path, name: str) -> list[psutil.Process]:
    found = []
    for process in family(folder):
        with suppress(psutil.Error):
            found += [process] if process.name() == name else []
    return found


class Found(psutil.Process):
    """A living process; while somebody looks at it, the guard's thread finds the other one."""

    guard: RayGuard

    def is_running(self) -> bool:
        self.guard._seen.setdefault("raylet", psutil.Process())
        return super().is_running()


def test_the_guard_is_asked_while_its_thread_finds_a_process() -> None:
    guard, process = RayGuard(), Found()
    process.guard = guard
    guard._seen["gcs_server"] = process
    assert guard.fault() is None and len(guard._seen) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name, words", [("gcs_server", "control service"), ("raylet", "node process")])
def test_a_process_that_ray_needs_is_killed_while_it_starts(tmp_path: Path, name: str, words: str) -> None:
    process, _ = programs.start(tmp_path, f"{programs.FORKS_WORKERS}{PROGRAM}", 60, **{MARK: str(tmp_path)})
    deadline = time.monotonic() + 120
    while not (found := named(tmp_path, name)):
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.02)
    time.sleep(0.5)  # the guard has seen it, and Ray's client has connected to it, or has not
    found[0].kill()
    assert process.wait(timeout=60) == 3, (tmp_path / "log").read_text()
    said = (tmp_path / "log").read_text()
    assert (
        f"Ray's {words} ({name}) has ended: it was killed, or it failed" in said and "Traceback" not in said
    )
    deadline = time.monotonic() + 10
    while left := family(tmp_path):
        assert time.monotonic() < deadline, [process.name() for process in left]
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "raylet"])
def test_rays_agents_end_with_a_command_or_a_node_process_that_is_killed(tmp_path: Path, name: str) -> None:
    """Both end without a word to them; the control service that they would report it to ends as well."""
    process, _ = programs.start(tmp_path, f"{programs.FORKS_WORKERS}{PROGRAM}", 300, **{MARK: str(tmp_path)})
    deadline = time.monotonic() + 120
    while "up" not in (tmp_path / "log").read_text():
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.02)
    time.sleep(1.0)  # the agents run
    (named(tmp_path, name)[0] if name else process).send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == (3 if name else -signal.SIGKILL), (tmp_path / "log").read_text()
    deadline = time.monotonic() + 10
    while left := family(tmp_path):
        assert time.monotonic() < deadline, [process.name() for process in left]
        time.sleep(0.1)
