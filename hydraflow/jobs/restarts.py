"""Restarts a run after a worker failure, up to `trainer.max_restarts` times, from its last complete
checkpoint.

In: a job, and the WorkerError that ended it. Out: the job again, in the same run folder, after a pause that
doubles each time. Only worker failures are retried: configuration and data errors, rows that are too large,
and guards would fail in the same way again. Left out on purpose: how a run resumes (`run_start.py`); restarts
after the controller itself died (a batch system starts the same command again).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from hydraflow.dispatch.observability import controller_log
from hydraflow.errors import WorkerError
from hydraflow.schema import PPOConfig, SupervisedConfig
from hydraflow.tracking.endings import RECEIVED
from hydraflow.tracking.run_folder import RunFolder
from hydraflow.trainer.checkpoint_store import CheckpointStore
from hydraflow.trainer.clock import parse_duration
from hydraflow.trainer.config import LoopConfig
from hydraflow.trainer.signals import StopSignals

logger = logging.getLogger(__name__)
Config = TypeVar("Config", PPOConfig, SupervisedConfig)
Trainer = TypeVar("Trainer", bound=LoopConfig)

LONGEST_PAUSE = 300.0
POLL_SECONDS = 0.2


@dataclass
class Restarts:
    """Counts the restarts of one command, and decides whether there is another."""

    trainer: LoopConfig
    """The section as the user gave it."""
    done: int = 0
    """Number of restarts so far."""
    folder: RunFolder | None = None
    """The run folder; None: the run has not started."""
    stop_requested: bool = False
    """Whether a signal asked the run to end before its worker failed; the same signal may have ended the
    worker."""
    started: float = field(default_factory=time.monotonic)

    def pause(self) -> float:
        """Seconds before the next restart."""
        return min(LONGEST_PAUSE, self.trainer.restart_backoff * 2 ** min(self.done, 30))

    def is_possible(self) -> bool:
        """Whether the run may restart: there is a run to resume, restarts and time are left, and no signal
        asked it to stop."""
        if self.folder is None or not self.trainer.max_restarts or self.stop_requested:
            return False
        if self.done >= self.trainer.max_restarts:
            logger.warning("trainer.max_restarts=%d restarts are used up", self.trainer.max_restarts)
            return False
        left = self.seconds_left()
        return left is None or left > self.pause()

    def seconds_left(self) -> float | None:
        """Seconds left of trainer.max_wall_time, which counts from the first start; None: no limit."""
        limit = parse_duration(self.trainer.max_wall_time)
        return None if limit is None else limit - (time.monotonic() - self.started)

    def next_trainer(self, trainer: Trainer) -> Trainer:
        """The settings with which the run resumes in its folder."""
        assert self.folder is not None, "there is a run to resume"
        mode = "auto" if trainer.resume_mode == "disable" else trainer.resume_mode
        folder, left = str(self.folder.path), self.seconds_left()
        return replace(trainer, default_local_dir=folder, resume_mode=mode, max_wall_time=left)


def with_restarts(config: Config, start: Callable[[Config, Restarts], None]) -> None:
    """Starts a run, and again after each worker failure while restarts are left."""
    restarts = Restarts(config.trainer)
    while True:
        try:
            return start(config, restarts)
        except WorkerError as error:
            if not restarts.is_possible():
                raise
            reason = str(error).splitlines()[0]
        assert restarts.folder is not None, "only a run with a folder is restarted"
        with controller_log(restarts.folder.path, config.log):  # the session has closed its own
            if not _wait(restarts, restarts.folder, reason):
                return
        restarts.done += 1
        config = replace(config, trainer=restarts.next_trainer(config.trainer))


def _wait(restarts: Restarts, folder: RunFolder, reason: str) -> bool:
    """Pauses before a restart. False: a signal asked the run to stop meanwhile; the requeue file is written
    for the batch system."""
    number, pause = restarts.done + 1, restarts.pause()
    text = "%s -- RESTART %d of %d in %g seconds, from the last complete checkpoint in %s"
    logger.warning(text, reason, number, restarts.trainer.max_restarts, pause, folder.path)
    until = time.monotonic() + pause
    with StopSignals() as signals:
        while time.monotonic() < until and not signals.received:
            time.sleep(POLL_SECONDS)
    if signals.received:
        folder.write_requeue(CheckpointStore(folder.path).pointer() or 0, f"{signals.received}{RECEIVED}")
    return not signals.received
