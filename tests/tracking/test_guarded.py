"""Trackers that fail, hang or cannot be opened: one warning each, and training never waits long."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

from hydraflow.tracking import guarded, trackers
from hydraflow.tracking.base import RunInfo
from hydraflow.tracking.guarded import BackgroundTracker, ForegroundTracker
from hydraflow.tracking.history import read_metrics
from hydraflow.tracking.symptoms import SymptomWatch
from hydraflow.tracking.trackers import open_trackers


class Memory:
    """Remembers what it got. `fails`: steps of which logging fails, with how often."""

    def __init__(
        self, fails: dict[int, int] | None = None, opens: bool = True, hangs: threading.Event | None = None
    ):
        if not opens:
            raise RuntimeError("no such server")
        self.fails, self.hangs = dict(fails or {}), hangs
        self.got: list[int] = []
        self.closed: list[bool] = []

    def log(self, metrics: dict[str, float], step: int) -> None:
        if self.hangs is not None:
            self.hangs.wait()
        if self.fails.get(step, 0) > 0:
            self.fails[step] -= 1
            raise ConnectionError("broken pipe")
        self.got.append(step)

    def log_samples(self, samples: object, step: int) -> None:
        self.got.append(-step)

    def flush(self) -> None:
        self.got.append(0)

    def close(self, *, failed: bool = False) -> None:
        self.closed.append(failed)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "PAUSES", (0.01, 0.01))


def background(memory: Memory, tmp_path: Path) -> BackgroundTracker:
    return BackgroundTracker("memory", lambda run: memory, RunInfo(tmp_path, "", None))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_calls_come_in_their_order_and_a_passing_fault_is_not_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory({2: 2})
    tracker = background(memory, tmp_path)
    for step in (1, 2, 3):
        tracker.log({}, step)
    tracker.log_samples([], 3)
    tracker.flush()
    assert memory.got == [1, 2, 3, -3, 0], "a flush has waited for all"
    tracker.close(failed=True)
    assert memory.closed == [True]
    assert warnings(caplog) == []


def test_a_lasting_fault_costs_one_warning_and_a_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory({step: 99 for step in range(3, 9)})
    tracker = background(memory, tmp_path)
    for step in range(1, 11):
        tracker.log({}, step)
    tracker.close()
    assert memory.got == [1, 2, 9, 10], "it is tried again with every step"
    assert warnings(caplog) == [
        (
            "tracker memory lost a call (ConnectionError: broken pipe); training continues;"
            " metrics.jsonl has everything"
        ),
        "memory: 6 calls were lost in total; metrics.jsonl has everything",
    ]


def test_a_tracker_that_hangs_holds_up_neither_a_step_nor_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "FLUSH_SECONDS", 0.1)
    monkeypatch.setattr(guarded, "CLOSE_SECONDS", 0.2)
    release = threading.Event()
    tracker = background(Memory(hangs=release), tmp_path)
    began = time.monotonic()
    for step in range(1, guarded.HELD_CALLS + 10):
        tracker.log({}, step)
    for _ in range(100):
        tracker.flush()  # only the first one waits
    tracker.close()
    assert time.monotonic() - began < 2
    reported = warnings(caplog)
    assert len(reported) == 2
    assert "too slow: 2000 calls are waiting" in reported[0]
    assert reported[1].startswith("memory: gave up after waiting 0.2 seconds for pending calls")
    release.set()


def test_several_that_hang_are_waited_for_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "CLOSE_SECONDS", 0.5)
    release = threading.Event()
    opened = [background(Memory(hangs=release), tmp_path) for _ in range(5)]
    together = trackers.Trackers(opened, SymptomWatch())
    together.log({}, 1)
    began = time.monotonic()
    together.close()
    assert 0.4 < time.monotonic() - began < 1.5
    release.set()


def test_a_run_whose_trackers_cannot_be_opened_is_logged_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "wandb", lambda run: Memory(opens=False))
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", lambda run: Memory({1: 99, 2: 99}))
    with open_trackers(["wandb", "mlflow"], RunInfo(tmp_path)) as opened:
        opened.log({"a": 1.0}, 1)
        opened.log({"a": 2.0}, 2)
    assert [record["a"] for record in read_metrics(tmp_path)] == [1.0, 2.0]
    reported = warnings(caplog)
    assert sum("wandb could not be opened (RuntimeError: no such server)" in line for line in reported) == 1
    assert sum("mlflow lost a call" in line for line in reported) == 1


def test_a_terminal_that_is_gone_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    tracker = ForegroundTracker("console", Memory({1: 1, 2: 1}))
    for step in (1, 2, 3):
        tracker.log({}, step)
    assert tracker.tracker.got == [3]  # type: ignore[attr-defined]
    assert warnings(caplog) == ["console: broken pipe; training continues; metrics.jsonl has everything"]


@pytest.mark.parametrize("leaves", [SystemExit, KeyboardInterrupt])
def test_a_library_that_leaves_is_reported_like_any_other_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, leaves: type[BaseException]
) -> None:
    class Leaving(Memory):
        def log(self, metrics: dict[str, float], step: int) -> None:
            if step == 1:
                raise leaves("http://me:s3cr3t@host does not answer")
            super().log(metrics, step)

    memory = Leaving()
    tracker = background(memory, tmp_path)
    for step in (1, 2):
        tracker.log({}, step)
    tracker.close()
    assert memory.got == [2] and memory.closed == [False], "the thread goes on"
    reported = warnings(caplog)
    assert len(reported) == 2 and f"({leaves.__name__}: http://(hidden)@host does not answer)" in reported[0]


def test_whatever_draws_on_the_terminal_raises_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Memory):
        def log(self, metrics: dict[str, float], step: int) -> None:
            raise LookupError("no such style")

    tracker = ForegroundTracker("console", Odd())
    for step in (1, 2):
        tracker.log({}, step)
    assert warnings(caplog) == ["console: no such style; training continues; metrics.jsonl has everything"]
