"""Opens and closes what every training command needs: clock, run folder, Ray, trackers, summary.

In: the run's configuration. Out: a context in which training happens. On exit, for whatever reason, workers
are gone and the run folder holds metrics, curve and summary. Nothing is written before `begin`, so a rejected
run leaves no trace.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial, reduce
from operator import getitem
from pathlib import Path

from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.batch_plan.sft import SFTPlan
from hydraflow.compose.command import Command
from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.observability import controller_log, observability_of
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.profiler import require_profiler
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.timeline import TIMELINE
from hydraflow.errors import ConfigError, EnvironmentFault, Faults, HydraflowError, WorkerError, first_line
from hydraflow.jobs import run_start
from hydraflow.jobs.restarts import Restarts
from hydraflow.jobs.run_start import RunStart
from hydraflow.options import walk
from hydraflow.redact import public
from hydraflow.schema import PPOConfig, SupervisedConfig
from hydraflow.system.interrupts import ending, is_hidden_interrupt
from hydraflow.system.logging_setup import set_up_logging
from hydraflow.system.paths import require_writable
from hydraflow.system.role_logs import RoleLogs
from hydraflow.tracking.base import PublishedInfo, RunInfo
from hydraflow.tracking.curve import draw_curve
from hydraflow.tracking.endings import DONE
from hydraflow.tracking.history import read_metrics, seconds_of
from hydraflow.tracking.provenance import facts_of_start
from hydraflow.tracking.run_folder import RunFolder
from hydraflow.tracking.summary import print_summary, summarise
from hydraflow.tracking.trackers import Trackers, open_trackers
from hydraflow.trainer.checkpoint_store import CheckpointStore
from hydraflow.trainer.clock import Clock, parse_duration
from hydraflow.trainer.config import LoopConfig
from hydraflow.trainer.machine import (
    Machine,
    open_runtime,
    require_room,
    resolve_machine,
    scoring_pool,
    training_pool,
)
from hydraflow.trainer.resume import CheckpointRequirements
from hydraflow.trainer.signals import StopSignals

logger = logging.getLogger(__name__)


class Session:
    """One run, from its folder to its summary. Ray starts on first use; `scoring` adds the reward pool."""

    def __init__(
        self, config: PPOConfig | SupervisedConfig, *, scoring: bool, restarts: Restarts | None = None
    ):
        trainer, self.ray_init, self.scoring = config.trainer, config.ray_init, scoring
        self.trainer: LoopConfig = trainer
        self._values = {leaf.key: leaf.value for leaf in walk(config)}
        self.log, self.profiler, self.debug = config.log, config.global_profiler, config.debug
        set_up_logging(config.log.level)
        self.faults = Faults()
        """Errors found here and by the job, all raised together before anything starts."""
        self.faults.passes(lambda: require_writable(config.ray_init.timeline_file, TIMELINE))
        self.faults.passes(lambda: require_profiler(config.global_profiler))
        self.faults.passes(lambda: RunFolder.prove_writable(trainer.default_local_dir))
        self.found_machine = self.faults.result(lambda: resolve_machine(trainer))
        """None: the machine lacks what the configuration asks for."""
        self._training: ResourcePool | None = None
        if self.found_machine is not None:
            self.place(training_pool(self.found_machine))
        self.restarts = restarts or Restarts(trainer)
        self.signals = StopSignals()
        self.clock = Clock(parse_duration(trainer.max_wall_time), self.signals)
        self.why = "interrupted"
        self._start: RunStart | None = None
        self._seconds_before = 0.0
        self._runtime: Runtime | None = None
        self._trackers: Trackers | None = None
        self._about = PublishedInfo()
        self._log_stack = ExitStack()
        self._log_files: RoleLogs | None = None

    def begin(self, required: CheckpointRequirements) -> bool:
        """Chooses and locks the run folder, and finds the checkpoint to resume from. False: the run is
        already complete.

        ConfigError with everything in `faults`, or as in `run_start.begin`.
        """
        self.faults.require_none()
        self._start = run_start.begin(self.trainer, required, self._values)
        self.restarts.folder = self._start.folder
        lacks_model = self.trainer.save_final_model and not self.folder.final_model.exists()
        if self._start.is_done(required.total_steps) and not lacks_model:
            done, asked = self._start.step, required.total_steps
            all_of = f"all {asked}" if done == asked else f"{done} of {asked}"
            print(f"{self.folder.path}: {all_of} steps are done; nothing was started")
            longer = "a larger trainer.total_training_steps continues it, "
            remedy = "trainer.resume_mode=disable starts from scratch"
            print(remedy if required.identity.knows_its_end else f"{longer}{remedy}")
            return False
        if self._start.found is not None:
            self._start = run_start.take_back(self._start)
        self._log_files = self._log_stack.enter_context(controller_log(self.folder.path, self.log))
        return True

    @property
    def has_started(self) -> bool:
        """Whether there is a run folder."""
        return self._start is not None

    @property
    def start(self) -> RunStart:
        """Run folder and checkpoint; only after `begin`."""
        assert self._start is not None, "begin() has not been called"
        return self._start

    @property
    def folder(self) -> RunFolder:
        """The run folder; only after `begin`."""
        return self.start.folder

    @property
    def machine(self) -> Machine:
        assert self.found_machine is not None, "faults are raised before the machine is used"
        return self.found_machine

    @property
    def runtime(self) -> Runtime:
        """Ray, started on first use."""
        if self._runtime is None:
            shown = observability_of(self.folder.path, self.log, self.profiler, debug=self.debug)
            ray_init = self._numbered(self.ray_init)
            self._runtime = open_runtime(self.trainer, ray_init, self.machine, self._pools(), shown)
        return self._runtime

    def place(self, training: ResourcePool) -> None:
        """Sets the devices of the training roles, before Ray starts; by default those of the machine."""
        self._training = training
        self.faults.passes(lambda: require_room(self.trainer, self.ray_init, self._pools()))

    def _pools(self) -> list[ResourcePool]:
        assert self._training is not None, "faults are raised before the machine is used"
        return [self._training, *([scoring_pool()] if self.scoring else [])]

    def _numbered(self, ray_init: RayInitConfig) -> RayInitConfig:
        """Renames a restart's timeline file, so that the timeline of the failure is kept."""
        if ray_init.timeline_file is None or not self.restarts.done:
            return ray_init
        path = Path(ray_init.timeline_file)
        numbered = path.with_stem(f"{path.stem}-restart-{self.restarts.done}")
        return replace(ray_init, timeline_file=str(numbered))

    def keep(
        self,
        config: PPOConfig | SupervisedConfig,
        plan: BatchPlan | SFTPlan,
        command: Command,
        files: Mapping[str, Path] | None = None,
    ) -> None:
        """Writes the requested configuration, the origins of its values, the plan, this start's facts
        (command line, commit, versions) and the user's code files to the run folder, and all but the code to
        the trackers."""
        folder, kept = self.folder, asdict(config) | {"trainer": asdict(self.restarts.trainer)}
        for key, value in command.written.items():  # names of environment variables instead of their values
            *sections, name = key.split(".")
            reduce(getitem, sections, kept)[name] = value
        facts = facts_of_start(self.start.step, command.words) | {"code": folder.keep_code(files or {})}
        folder.write_config(kept, command.origins)
        folder.write_plan(plan.to_json())
        folder.note_start(facts)
        self._about = PublishedInfo(
            project=self.trainer.project_name,
            experiment=self.trainer.experiment_name,
            config=public(kept),
            facts=facts,
            files=(folder.plan, folder.run),
            wandb_proxy=self.trainer.wandb_proxy,
        )

    def validates_first(
        self, total_steps: int, schedule: LoopConfig, *, before_training: bool = False
    ) -> bool:
        """Whether the run validates before it does a step: at its start, if asked to, and where an earlier
        start had no time for the validation after its last step. `schedule`: its frequencies are in steps."""
        step = self.start.step
        if not step:
            return before_training
        last = read_metrics(self.folder.path)[-1:]
        if any(name.startswith(("val-", "val/")) for row in last for name in row):
            return False
        return step >= total_steps or (bool(last) and schedule.validates_after(step))

    def open_trackers(self, total_steps: int) -> Trackers:
        """The trackers of the run, closed with the session."""
        self._seconds_before = seconds_of(read_metrics(self.folder.path))
        run = RunInfo(
            self.folder.path,
            title=f"{self.trainer.project_name}/{self.trainer.experiment_name}",
            total_steps=total_steps,
            run_id=self.start.run_id,
            done_steps=self.start.step,
            about=self._about,
            redraws=not (self.debug or self.trainer.debug.local),
        )
        self._trackers = open_trackers(self.trainer.logger, run)
        return self._trackers

    def __enter__(self) -> Session:
        self.signals.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Closes everything that the session opened. If an error ended the run, that error is raised, and
        failures to close are only warnings."""
        if isinstance(error, ConfigError) and self._runtime is not None:
            error.started = True
        cause: BaseException | None = None
        if is_hidden_interrupt(error):
            cause = KeyboardInterrupt()
        elif self._runtime is not None:
            cause = self._runtime.fault_behind(error)
        self._note_why(cause or error)
        with ending(cause or error):
            faults = [_fault_of(what, step) for what, step in self._steps(error).items()]
            self.restarts.stop_requested = self.clock.preempted
            self.signals.__exit__(kind, error, trace)
        decisive = [fault for fault in faults if isinstance(fault, EnvironmentFault | KeyboardInterrupt)]
        if cause is not None:
            raise cause from error
        if error is None and decisive:
            raise decisive[0]

    def _note_why(self, error: BaseException | None) -> None:
        """Records in `why`, and in the log file, the error that ended the run, if any."""
        if isinstance(error, HydraflowError):
            self.why = first_line(error)
        elif isinstance(error, Exception):
            self.why = f"{type(error).__name__}: {error}".splitlines()[0]
        elif error is not None:  # perhaps while the final model was written
            self.why = self.clock.why_to_stop() if self.signals.insisted else "interrupted"
        if self._log_files is not None and error is not None:  # the caller prints the error itself
            text = error if isinstance(error, HydraflowError) else self.why
            self._log_files.line("ERROR", f"{__name__}: {text}")

    def _steps(self, error: BaseException | None) -> dict[str, Callable[[], None]]:
        """The steps that close the run, in order."""
        steps: dict[str, Callable[[], None]] = {}
        if self._trackers is not None:
            steps["closing the trackers"] = partial(self._trackers.close, failed=error is not None)
        if self._runtime is not None:
            steps["ending the workers"] = self._runtime.stop
        steps["writing the summary"] = self._summarise
        steps["closing the log"] = self._log_stack.close
        steps["leaving the run folder"] = partial(self._leave, error)
        return steps

    def _leave(self, error: BaseException | None) -> None:
        """Writes the requeue file if the run was preempted and can resume, and unlocks the folder."""
        if self._start is None:
            return
        # no failures: a signal to the process group also ends workers, and a repeated one ends a step
        failed = error is not None and not isinstance(error, WorkerError) and not self.signals.insisted
        try:
            if self.clock.preempted and self.why != DONE and not failed:
                step = CheckpointStore(self.folder.path).pointer() or 0
                self.folder.write_requeue(step, self.clock.why_to_stop())
        finally:
            self._start.lock.release()

    def _summarise(self) -> None:
        if self._trackers is None:
            return
        seconds = self._seconds_before + self.clock.seconds()
        summary = summarise(self.folder.path, seconds=seconds, why_it_ended=self.why)
        self.folder.write_summary(summary)
        draw_curve(self.folder.path, self.folder.curve, title=self.trainer.experiment_name)
        print_summary(summary, self.folder.path)


def _fault_of(what: str, step: Callable[[], None]) -> BaseException | None:
    """The error of a closing step, if any. Catches all errors, because libraries raise any, and the steps
    that follow must run."""
    try:
        step()
    except (Exception, KeyboardInterrupt) as fault:
        text = fault if isinstance(fault, HydraflowError) else f"{type(fault).__name__}: {fault}"
        logger.warning("%s: %s", what, text)
        return fault
    return None
