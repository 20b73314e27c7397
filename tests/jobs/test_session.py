"""What a run says and does when it begins, without Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydraflow.dispatch.config import ProfilerConfig
from hydraflow.jobs.session import Session
from hydraflow.role_logs import LogSettings
from hydraflow.schema import SFTConfig
from hydraflow.trainer.config import SFTTrainerConfig
from hydraflow.trainer.identity import Identity
from hydraflow.trainer.resume import Wanted


def begun(folder: Path, **sections: object) -> None:
    """Begins a run of eight steps in a folder, and ends it."""
    config = SFTConfig(trainer=SFTTrainerConfig(default_local_dir=str(folder)), **sections)  # type: ignore[arg-type]
    with Session(config, scoring=False) as session:
        assert session.begin(Wanted(Identity({}), {}, 8))


@pytest.mark.parametrize(("steps", "told"), [([3, 8], ""), ([3, 9, 12], "[9, 12]")])
def test_profiled_steps_that_never_come_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, steps: list[int], told: str) -> None:
    begun(tmp_path, global_profiler=ProfilerConfig(tool="torch", steps=steps))
    expected = f"global_profiler.steps: the run has 8 steps, so it never comes to {told}"
    assert [record.getMessage() for record in caplog.records if "profiler" in record.getMessage()] == ([expected] if told else [])


def test_a_run_can_do_without_log_files(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hydraflow.jobs.session.log_settings", lambda run, log: LogSettings("/proc/nowhere"))
    begun(tmp_path)
    assert "no log files in /proc/nowhere" in caplog.text
