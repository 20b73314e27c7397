"""A deadline passes: the stacks of all workers are in a file, whatever state they are in."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from dispatch.probes import Probe, Troubled

from hydraflow.dispatch import stacks
from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.group import RoleGroup, Timeouts
from hydraflow.dispatch.observability import Observability
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.worker import ProcessContext, RoleSpec, Worker
from hydraflow.errors import WorkerError
from hydraflow.system.role_logs import LogSettings


@pytest.fixture
def runtime(tmp_path: Path, ray_session: None) -> Iterator[Runtime]:
    """Two pools; calls may take three seconds."""
    observability = Observability(logs=LogSettings(str(tmp_path / "logs")), stacks=str(tmp_path / "stacks"))
    with Runtime(RayInitConfig(), Timeouts(start=120, call=3), observability=observability) as runtime:
        runtime.start(
            [
                ResourcePool("pair", [2], cpus=0.25),
                ResourcePool("beside", [1], cpus=0.25),
            ]
        )
        yield runtime


@pytest.fixture
def troubled(runtime: Runtime) -> RoleGroup:
    group = runtime.group("pair", {"troubled": RoleSpec(Troubled), "idle": RoleSpec(Probe)})
    runtime.group("beside", {"other": RoleSpec(Probe)})
    runtime.await_ready()
    return group.role("troubled")


def failure(role: RoleGroup) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        role.call(Troubled.sleep_on, 1, 600.0)
    return caught.value


def parts(folder: Path) -> dict[str, str]:
    """Name of each process -> what the only file says of it."""
    (file,) = folder.glob("*.txt")
    head, *rest = file.read_text().split("=== ")
    assert ", sleep_on: no answer in 3 seconds" in head
    return {part.partition(",")[0]: part for part in rest}


def test_all_workers_of_all_groups(troubled: RoleGroup, tmp_path: Path) -> None:
    error = failure(troubled)
    found = parts(tmp_path / "stacks")
    assert str(next((tmp_path / "stacks").glob("*.txt"))) in str(error)
    assert sorted(found) == ["other rank 0", "troubled+idle rank 0", "troubled+idle rank 1"]
    assert (
        "sleep_on (dispatch/probes.py" in found["troubled+idle rank 1"]
        or "sleep_on" in found["troubled+idle rank 1"]
    )
    assert "sleep_on" not in found["troubled+idle rank 0"] and "main_loop" in found["other rank 0"]
    assert "in sleep_on" in error.log_tail, "the last lines of the role's own log"


def test_a_process_that_is_stopped(troubled: RoleGroup, tmp_path: Path) -> None:
    pids = troubled.call(Troubled.pids)
    os.kill(pids[0], signal.SIGSTOP)
    failure(troubled)
    assert "Thread" in parts(tmp_path / "stacks")["troubled+idle rank 0"]


def test_without_py_spy_a_process_writes_its_own(
    troubled: RoleGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "spy", lambda: None)
    pids = troubled.call(Troubled.pids)
    os.kill(pids[0], signal.SIGSTOP)
    failure(troubled)
    found = parts(tmp_path / "stacks")
    assert "py-spy is not installed; written by the process itself" in found["troubled+idle rank 1"]
    assert "in sleep_on" in found["troubled+idle rank 1"]
    assert "the process wrote nothing in 2 seconds: it is stopped" in found["troubled+idle rank 0"]


def test_stacks_of_the_same_second_are_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_of_all_nodes", lambda processes: {})
    process = stacks.NamedProcess("actor rank 0", stacks.ProcessInfo(1, "node", "worker", ""))
    files = [Path(stacks.write_stacks(tmp_path, why, [process])) for why in ("first", "second", "third")]
    assert [file.read_text().split()[0] for file in files] == ["first", "second", "third"]


class Slow(Worker):
    """Is never built."""

    def __init__(self, process: ProcessContext):
        super().__init__(process)
        signal.sigwait([signal.SIGTERM])


def test_a_start_that_takes_too_long(tmp_path: Path, ray_session: None) -> None:
    with Runtime(
        RayInitConfig(), Timeouts(start=12, call=60), observability=Observability(stacks=str(tmp_path))
    ) as runtime:
        runtime.start([ResourcePool("pool", [1], cpus=0.25)])
        runtime.group("pool", {"slow": RoleSpec(Slow)})
        with pytest.raises(WorkerError, match="no answer in 12 seconds; stacks of all workers: "):
            runtime.await_ready()
    (file,) = tmp_path.glob("*.txt")
    assert "=== slow rank 0" in file.read_text() and "__init__" in file.read_text()
