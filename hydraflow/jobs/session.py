"""What every training command opens and closes: clock, run folder, Ray, trackers, summary.

In: the run's configuration. Out: a context in which training happens; on leaving, whatever the reason, workers are gone and the
run folder holds metrics, curve and summary.
"""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from types import TracebackType
from typing import Any

from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.runtime import Runtime
from hydraflow.errors import HydraflowError
from hydraflow.logging_setup import set_up_logging
from hydraflow.tracking.curve import draw_curve
from hydraflow.tracking.run_folder import RunFolder
from hydraflow.tracking.summary import print_summary, summarise
from hydraflow.tracking.trackers import Trackers, check_names, open_trackers
from hydraflow.trainer.clock import Clock, parse_duration
from hydraflow.trainer.config import LoopConfig
from hydraflow.trainer.machine import Machine, open_runtime, resolve_machine, scoring_pool, training_pool


class Session:
    """One run, from its folder to its summary. Ray starts when it is first asked for; `scoring` adds the pool for rewards."""

    def __init__(self, trainer: LoopConfig, ray_init: RayInitConfig, *, scoring: bool):
        self.trainer, self.ray_init, self.scoring = trainer, ray_init, scoring
        set_up_logging()
        self.clock = Clock(parse_duration(trainer.max_wall_time))
        check_names(trainer.logger)
        self.machine: Machine = resolve_machine(trainer)
        self.folder = RunFolder.create(trainer.default_local_dir, trainer.experiment_name)
        self.why = "interrupted"
        self._runtime: Runtime | None = None
        self._trackers: Trackers | None = None

    @property
    def runtime(self) -> Runtime:
        """Ray, started on first use."""
        if self._runtime is None:
            pools = [training_pool(self.machine), *([scoring_pool()] if self.scoring else [])]
            self._runtime = open_runtime(self.trainer, self.ray_init, self.machine, pools)
        return self._runtime

    def open_trackers(self, total_steps: int) -> Trackers:
        """The trackers of the run, closed with the session."""
        title = f"{self.trainer.project_name}/{self.trainer.experiment_name}"
        self._trackers = open_trackers(self.trainer.logger, self.folder.path, title=title, total_steps=total_steps)
        return self._trackers

    def write_config(self, config: Any) -> None:
        """Keeps the whole configuration with the run."""
        assert is_dataclass(config) and not isinstance(config, type)
        self.folder.write_config(asdict(config))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, HydraflowError):
            self.why = str(error).splitlines()[0]
        elif isinstance(error, Exception):
            self.why = f"{type(error).__name__}: {error}".splitlines()[0]
        if self._runtime is not None:
            self._runtime.stop()
        if self._trackers is None:
            return
        self._trackers.close()
        summary = summarise(self.folder.path, seconds=self.clock.seconds(), why_it_ended=self.why)
        self.folder.write_summary(summary)
        draw_curve(self.folder.path, self.folder.curve, title=self.trainer.experiment_name)
        print_summary(summary, self.folder.path)
