"""What a run says and does when it begins, without Ray."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hydraflow.errors import ConfigError, EnvironmentFault, GuardStop
from hydraflow.jobs.session import Session
from hydraflow.schema import SFTConfig
from hydraflow.system.interrupts import SHUTDOWN
from hydraflow.system.role_logs import LogSettings
from hydraflow.tracking.run_lock import RunLock
from hydraflow.trainer.config import SupervisedTrainerConfig
from hydraflow.trainer.identity import Identity
from hydraflow.trainer.resume import CheckpointRequirements, ResumePoint
from hydraflow.trainer.run_state import RunState


def start(folder: Path, **sections: object) -> None:
    """Begins a run of eight steps in a folder, and ends it."""
    config = SFTConfig(trainer=SupervisedTrainerConfig(default_local_dir=str(folder)), **sections)  # type: ignore[arg-type]
    with Session(config, scoring=False) as session:
        assert session.begin(CheckpointRequirements(Identity({}), {}, 8))


def test_a_run_can_do_without_log_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = LogSettings("/proc/nowhere")
    monkeypatch.setattr("hydraflow.dispatch.observability.log_settings", lambda run, log: nowhere)
    start(tmp_path)
    assert "no log files in /proc/nowhere" in caplog.text


class Stopped:
    """A runtime that counts its stops and raises `fault` in them; `lost`: what ended of Ray, in words."""

    def __init__(self, fault: BaseException | None = None, *, lost: EnvironmentFault | None = None):
        self.fault, self.lost, self.stops = fault, lost, 0

    def fault_behind(self, error: BaseException | None) -> EnvironmentFault | None:
        return self.lost

    def stop(self) -> None:
        self.stops += 1
        if self.fault is not None:
            raise self.fault


def raising(fault: BaseException) -> Callable[..., None]:
    def close(**options: object) -> None:
        raise fault

    return close


def ended(
    folder: Path, error: BaseException | None, *, runtime: Stopped, closing: BaseException | None = None
) -> None:
    """Begins a run, logs one step, and ends with `error`; `closing`: what the trackers raise then."""
    config = SFTConfig(trainer=SupervisedTrainerConfig(default_local_dir=str(folder), logger=["file"]))
    with Session(config, scoring=False) as session:
        assert session.begin(CheckpointRequirements(Identity({}), {}, 8))
        trackers = session.open_trackers(8)
        trackers.log({"train/loss": 1.0}, 1)
        session.why = "all steps done"
        session._runtime = runtime  # type: ignore[assignment]
        if closing is not None:
            trackers.close = raising(closing)  # type: ignore[method-assign]
        if error is not None:
            raise error


def assert_left(folder: Path, runtime: Stopped) -> None:
    """Workers were ended, the folder is free, and the summary is there."""
    assert runtime.stops == 1
    RunLock(folder).release()
    assert (folder / "summary.json").exists()


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_interrupt_that_torch_hides_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrapped: bool
) -> None:
    monkeypatch.setattr(SHUTDOWN, "raised_at", 1.0)
    hidden = TypeError('argument failed to unpack with error "KeyboardInterrupt: <EMPTY MESSAGE>"')
    config = SFTConfig(trainer=SupervisedTrainerConfig(default_local_dir=str(tmp_path), logger=["file"]))
    with pytest.raises(KeyboardInterrupt), Session(config, scoring=False) as session:
        assert session.begin(CheckpointRequirements(Identity({}), {}, 8))
        session.open_trackers(8).log({"train/loss": 1.0}, 1)
        if wrapped:
            raise RuntimeError("a library") from hidden
        raise hidden
    assert json.loads((tmp_path / "summary.json").read_text())["why_it_ended"] == "interrupted"
    RunLock(tmp_path).release()


FAULTS = [OSError(122, "Disk quota exceeded"), RuntimeError("a library"), KeyboardInterrupt()]


@pytest.mark.parametrize("closing", FAULTS, ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("stopping", [None, *FAULTS], ids=lambda fault: type(fault).__name__)
def test_every_step_of_the_end_is_taken_and_what_ended_the_run_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, closing: BaseException, stopping: BaseException | None
) -> None:
    runtime = Stopped(stopping)
    with pytest.raises(GuardStop, match="too many"):
        ended(tmp_path, GuardStop("too many"), runtime=runtime, closing=closing)
    assert_left(tmp_path, runtime)
    assert f"closing the trackers: {type(closing).__name__}" in caplog.text
    assert json.loads((tmp_path / "summary.json").read_text())["why_it_ended"] == "too many"


def test_an_error_of_rays_is_reported_by_the_process_that_ended(tmp_path: Path) -> None:
    runtime = Stopped(lost=EnvironmentFault("Ray's node process (raylet) has ended"))
    with pytest.raises(EnvironmentFault, match="node process") as caught:
        ended(tmp_path, RuntimeError("Broken pipe"), runtime=runtime)
    assert_left(tmp_path, runtime)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert (
        json.loads((tmp_path / "summary.json").read_text())["why_it_ended"]
        == "Ray's node process (raylet) has ended"
    )


def test_a_tracker_that_cannot_be_closed_does_not_fail_a_run_that_is_done(tmp_path: Path) -> None:
    runtime = Stopped(OSError(5, "Input/output error"))
    ended(tmp_path, None, runtime=runtime, closing=OSError(122, "Disk quota exceeded"))
    assert_left(tmp_path, runtime)


def test_a_ctrl_c_during_the_end_of_a_run_that_was_done_is_not_lost(tmp_path: Path) -> None:
    runtime = Stopped()
    with pytest.raises(KeyboardInterrupt):
        ended(tmp_path, None, runtime=runtime, closing=KeyboardInterrupt())
    assert_left(tmp_path, runtime)


def test_a_summary_that_cannot_be_written_fails_a_run_that_is_done_and_frees_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hydraflow.jobs.session.RunFolder.write_summary",
        lambda folder, summary: raising(EnvironmentFault("full"))(),
    )
    with pytest.raises(EnvironmentFault, match="full"):
        ended(tmp_path, None, runtime=Stopped())
    RunLock(tmp_path).release()
    with pytest.raises(GuardStop):
        ended(tmp_path, GuardStop("too many"), runtime=Stopped())


def why(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["why_it_ended"])


def test_a_ctrl_c_while_the_last_files_are_written_leaves_a_run_that_is_not_done(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        ended(tmp_path, KeyboardInterrupt(), runtime=Stopped())
    assert why(tmp_path) == "interrupted"


def test_the_reason_of_a_configuration_error_is_its_first_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        ended(tmp_path, ConfigError.one("trainer.save_freq", 1, "no room"), runtime=Stopped())
    assert "trainer.save_freq=1: no room" in why(tmp_path)


@pytest.mark.parametrize(
    ("step", "logged", "validates"),
    [
        (0, {}, True),  # as val_before_train says
        (2, {"critic/score/mean": 0.5}, True),
        (2, {"val-core/x/acc/mean@1": 0.5}, False),
        (3, {"critic/score/mean": 0.5}, False),  # not due
        (8, {"critic/score/mean": 0.5}, True),
        (8, {"val/loss": 0.5}, False),
    ],
)
def test_a_validation_for_which_there_was_no_time_is_made_up_for(
    tmp_path: Path, step: int, logged: dict[str, float], validates: bool
) -> None:
    trainer = SupervisedTrainerConfig(default_local_dir=str(tmp_path), logger=["file"], test_freq=2)
    with Session(SFTConfig(trainer=trainer), scoring=False) as session:
        assert session.begin(CheckpointRequirements(Identity({}), {}, 8))
        session.open_trackers(8).log(logged, step)
        found = ResumePoint(tmp_path, RunState(step, 8, "", {}, {}, {}, ""), {}) if step else None
        session._start = replace(session.start, found=found)
        assert session.validates_first(8, trainer, before_training=True) == validates


def test_a_step_that_another_folder_logged_was_validated_there(tmp_path: Path) -> None:
    trainer = SupervisedTrainerConfig(default_local_dir=str(tmp_path), logger=["file"], test_freq=2)
    with Session(SFTConfig(trainer=trainer), scoring=False) as session:
        assert session.begin(CheckpointRequirements(Identity({}), {}, 8))
        found = ResumePoint(tmp_path, RunState(2, 8, "", {}, {}, {}, ""), {})
        session._start = replace(session.start, found=found)
        assert not session.validates_first(8, trainer)
