"""When a run whose worker failed is started again, and when not. What runs here fails at once;
`test_faults.py` kills real workers."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from hydraflow.errors import GuardStop, HydraflowError, WorkerError
from hydraflow.jobs.restarts import Restarts, with_restarts
from hydraflow.jobs.session import Session
from hydraflow.schema import SFTConfig
from hydraflow.tracking.run_folder import RunFolder
from hydraflow.trainer.config import SupervisedTrainerConfig
from hydraflow.trainer.identity import Identity
from hydraflow.trainer.resume import CheckpointRequirements

DIED = WorkerError(role="model", rank=0, node="here", method="update", cause="the process died")


class Failing:
    """A job that has started in a folder and ends with `error` in each of its runs."""

    def __init__(self, folder: Path, error: HydraflowError, **trainer: object):
        self.folder, self.error = RunFolder.make(str(folder), "sft"), error
        self.seen: list[SupervisedTrainerConfig] = []
        self.config = SFTConfig(trainer=SupervisedTrainerConfig(restart_backoff=0.0, **trainer))  # type: ignore[arg-type]

    def run(self) -> None:
        def start(config: SFTConfig, restarts: Restarts) -> None:
            self.seen.append(config.trainer)
            restarts.folder = self.folder
            raise self.error

        with_restarts(self.config, start)


def test_as_often_as_it_may_and_in_its_folder(tmp_path: Path) -> None:
    job = Failing(tmp_path, DIED, max_restarts=2, resume_mode="disable")
    with pytest.raises(WorkerError):
        job.run()
    assert [trainer.default_local_dir for trainer in job.seen] == [None, str(tmp_path), str(tmp_path)]
    assert [trainer.resume_mode for trainer in job.seen] == ["disable", "auto", "auto"], (
        "afresh means the first time"
    )


def test_the_restart_is_said_in_the_log_of_the_run(tmp_path: Path) -> None:
    """Between two starts no session is open."""
    job = Failing(tmp_path, DIED, max_restarts=1)
    with pytest.raises(WorkerError):
        job.run()
    said = (tmp_path / "logs" / "controller-0.log").read_text()
    assert (
        "model rank 0 on node here failed in update: the process died -- RESTART 1 of 1 in 0 seconds" in said
    )


def test_guards_are_final(tmp_path: Path) -> None:
    job = Failing(tmp_path, GuardStop("enough"), max_restarts=2)
    with pytest.raises(GuardStop):
        job.run()
    assert len(job.seen) == 1


def test_the_pause_doubles_up_to_five_minutes() -> None:
    restarts = Restarts(SupervisedTrainerConfig(restart_backoff=10.0))
    pauses = []
    for restarts.done in range(7):
        pauses.append(restarts.pause())
    assert pauses == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
    restarts.done = 5000
    assert restarts.pause() == 300.0


def test_a_worker_that_fails_after_the_run_was_asked_to_stop(tmp_path: Path) -> None:
    """A batch system sends SIGTERM to all processes: the workers end of it, and the run leaves a note instead
    of starting again."""
    trainer = SupervisedTrainerConfig(
        max_restarts=5, restart_backoff=0.0, default_local_dir=str(tmp_path), device="cpu"
    )
    starts = []

    def start(config: SFTConfig, restarts: Restarts) -> None:
        starts.append(config)
        with Session(config, scoring=False, restarts=restarts) as session:
            session.begin(CheckpointRequirements(Identity({}), {}, 8))
            os.kill(os.getpid(), signal.SIGTERM)
            raise DIED

    with pytest.raises(WorkerError):
        with_restarts(SFTConfig(trainer=trainer), start)
    assert len(starts) == 1
    assert json.loads((tmp_path / "requeue").read_text()) == {"step": 0, "why": "SIGTERM received"}
