"""What every training command opens and closes: clock, run folder, Ray, trackers, summary.

In: the run's configuration. Out: a context in which training happens; on leaving, whatever the reason, workers are gone and the
run folder holds metrics, curve and summary. Nothing is written before `open`, so a run that is refused leaves no trace.
"""

from __future__ import annotations

from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.runtime import Runtime
from hydraflow.errors import HydraflowError
from hydraflow.logging_setup import set_up_logging
from hydraflow.tracking.curve import draw_curve
from hydraflow.tracking.run_folder import RunFolder
from hydraflow.tracking.summary import print_summary, summarise
from hydraflow.tracking.trackers import Trackers, open_trackers
from hydraflow.trainer.clock import Clock, parse_duration
from hydraflow.trainer.config import LoopConfig
from hydraflow.trainer.machine import Machine, open_runtime, resolve_machine, scoring_pool, training_pool

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Plan(Protocol):
    """What is kept of a batch plan."""

    def to_json(self) -> str:
        """The content of plan.json."""


class Session:
    """One run, from its folder to its summary. Ray starts when it is first asked for; `scoring` adds the pool for rewards."""

    def __init__(self, trainer: LoopConfig, ray_init: RayInitConfig, *, scoring: bool):
        self.trainer, self.ray_init, self.scoring = trainer, ray_init, scoring
        set_up_logging()
        self.clock = Clock(parse_duration(trainer.max_wall_time))
        self.machine: Machine = resolve_machine(trainer)
        RunFolder.prove_writable(trainer.default_local_dir)
        self.why = "interrupted"
        self._folder: RunFolder | None = None
        self._runtime: Runtime | None = None
        self._trackers: Trackers | None = None

    @property
    def folder(self) -> RunFolder:
        """The run folder, made on first use."""
        if self._folder is None:
            self._folder = RunFolder.create(self.trainer.default_local_dir, self.trainer.experiment_name)
        return self._folder

    @property
    def runtime(self) -> Runtime:
        """Ray, started on first use."""
        if self._runtime is None:
            pools = [training_pool(self.machine), *([scoring_pool()] if self.scoring else [])]
            self._runtime = open_runtime(self.trainer, self.ray_init, self.machine, pools)
        return self._runtime

    def keep(self, config: DataclassInstance, plan: Plan) -> None:
        """Writes the whole configuration and the plan to the run folder."""
        self.folder.write_config(asdict(config))
        self.folder.plan.write_text(plan.to_json())

    def open_trackers(self, total_steps: int) -> Trackers:
        """The trackers of the run, closed with the session."""
        title = f"{self.trainer.project_name}/{self.trainer.experiment_name}"
        self._trackers = open_trackers(self.trainer.logger, self.folder.path, title=title, total_steps=total_steps)
        return self._trackers

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, HydraflowError):
            self.why = str(error).splitlines()[0]
        elif isinstance(error, Exception):
            self.why = f"{type(error).__name__}: {error}".splitlines()[0]
        if self._trackers is not None:
            self._trackers.close()
        if self._runtime is not None:
            self._runtime.stop()
        if self._trackers is not None:
            self._summarise()

    def _summarise(self) -> None:
        summary = summarise(self.folder.path, seconds=self.clock.seconds(), why_it_ended=self.why)
        self.folder.write_summary(summary)
        draw_curve(self.folder.path, self.folder.curve, title=self.trainer.experiment_name)
        print_summary(summary, self.folder.path)
