"""What happens between the steps of every kind of training: validate, log, save, stop.

In: a trainer, a validator, trackers. Out: why the training ended. The steps themselves are in `ppo.py`,
`rollout_only.py` and `sft.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Protocol

from hydraflow.dispatch.runtime import Runtime
from hydraflow.tracking.endings import DONE, VALIDATED
from hydraflow.tracking.trackers import Trackers
from hydraflow.trainer.checkpoint import Checkpointer
from hydraflow.trainer.clock import Clock, GracePeriodOver
from hydraflow.trainer.config import LoopConfig
from hydraflow.trainer.timing import PhaseTimer

logger = logging.getLogger(__name__)

StopRule = Callable[[dict[str, float]], bool]
"""Whether to stop early, given the metrics of a validation."""


class Source(Protocol):
    """Where a trainer's rows come from: a `TrajectorySource`, or a loader of conversations."""

    def give_back(self) -> None:
        """Undoes the last take, whose step was abandoned."""

    def state(self) -> dict[str, Any]:
        """State for checkpoints, as plain values: enough to continue with the next rows."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken."""


class Trainer(Protocol):
    """A trainer, as the loop sees it."""

    runtime: Runtime
    timer: PhaseTimer
    version: int
    """Version of the weights that a validation uses."""

    @property
    def source(self) -> Source: ...

    def begin(self, step: int) -> None:
        """Called once, before the first validation; `step`: training steps that are done."""

    def step(self, step: int, interrupt: Callable[[], None]) -> dict[str, float]:
        """Training step `step`, which counts from 1; returns its metrics. An exception from `interrupt` ends
        it before any weight, or any state that is saved, has changed."""


class Validator(Protocol):
    """A validation, as the loop sees it."""

    def run(self, step: int, version: int) -> dict[str, float]:
        """Metrics over all held-out rows after a step, with the weights of that version."""


class Loop:
    """Runs the steps and everything between them; `validator` is None where nothing is held out.

    `restarts`: how often the run was restarted after a failure. `profiled`: `global_profiler.steps` are steps
    of this loop.
    """

    def __init__(
        self,
        config: LoopConfig,
        trainer: Trainer,
        validator: Validator | None,
        trackers: Trackers,
        clock: Clock,
        *,
        restarts: int = 0,
        profiled: bool = True,
    ):
        self.config, self.trainer, self.validator = config, trainer, validator
        self.trackers, self.clock = trackers, clock
        self.restarts, self.profiled = restarts, profiled

    def fit(
        self,
        checkpoints: Checkpointer | None,
        total_steps: int,
        *,
        done: int = 0,
        validate_first: bool = False,
        stop_when: StopRule | None = None,
    ) -> str:
        """Trains until the steps or the time are used up or `stop_when` holds; returns why it ended. `done`:
        steps of earlier starts of the run. `checkpoints` None: nothing is saved. `validate_first`: validates
        before the first step, too; a start with no steps left only validates.

        A step is logged before it is saved: a checkpoint is never ahead of the metrics.
        """
        self.trainer.begin(done)
        if validate_first:
            metrics = self._validate(done)
            if metrics or not (done or self.clock.preempted):  # an abandoned validation has nothing to log
                self.trackers.log(metrics, step=done)
            if done and checkpoints is not None:
                checkpoints.compare(done, metrics)
        if self.clock.preempted:
            return self.clock.why_to_stop()
        for step in range(done + 1, total_steps + 1):
            try:
                with self.trainer.runtime.profiled(step) if self.profiled else nullcontext():
                    metrics = self.trainer.step(step, self.clock.check_grace_period)
            except GracePeriodOver:
                self.trainer.source.give_back()
                self._give_up(step, checkpoints, done=done)
                return self.clock.why_to_stop()
            why = DONE if step == total_steps else self.clock.why_to_stop()
            # a preempted run has no time for an extra validation
            if why == DONE or (why and not self.clock.preempted) or self.config.validates_after(step):
                found = self._validate(step)
                metrics |= found
                if found and stop_when is not None and stop_when(found):
                    why = "accuracy reached"
                elif why == DONE and self.clock.preempted and not found and self.validator is not None:
                    why = self.clock.why_to_stop()  # the next start validates
            self.trackers.log(metrics | self._position(step), step=step)
            preempted = self.clock.preempted
            if checkpoints is not None:
                with self.trainer.timer.phase("save_checkpoint"):
                    checkpoints.after(step, metrics, last=bool(why), preempted=preempted)
            if why or preempted:
                return why or self.clock.why_to_stop()
        return DONE

    def validate_only(self, step: int = 0) -> str:
        """Validates once, with the model as of `step`; returns why it ended."""
        self.trainer.begin(step)
        metrics = self._validate(step)
        if not metrics and self.clock.preempted:
            return self.clock.why_to_stop()
        self.trackers.log(metrics, step=step)
        return VALIDATED

    def _give_up(self, step: int, checkpoints: Checkpointer | None, *, done: int) -> None:
        """Abandons a step, and saves the state before it unless that is already saved."""
        logger.warning("step %d is abandoned: its rewards are not ready, and the run must end", step)
        before = step - 1
        if checkpoints is not None and before > done and not checkpoints.has(before):
            checkpoints.after(before, {}, last=True, preempted=True)

    def _position(self, step: int) -> dict[str, float]:
        return {
            "training/global_step": step,
            "training/restarts": float(self.restarts),
            "perf/seconds_since_launch": self.clock.seconds_since_launch(),
        }

    def _validate(self, step: int) -> dict[str, float]:
        """The metrics of a validation; none if nothing is held out, or if it was abandoned."""
        if self.validator is None:
            return {}
        try:
            with (
                self.trainer.timer.phase("testing"),
                self.trainer.runtime.interruptible(self.clock.check_grace_period),
            ):
                metrics = self.validator.run(step, self.trainer.version)
        except GracePeriodOver:
            why = "its samples or rewards are not ready, and the run must end"
            logger.warning("the validation after step %d is abandoned: %s", step, why)
            return {}
        return metrics | self.trainer.timer.drain()
