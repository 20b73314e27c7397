"""What happens around the steps: validate, log, save, stop. The step itself is in `ppo.py`.

In: a trainer, a stream of prompts, trackers. Out: why the training ended. The same loop serves PPO, GRPO,
RLOO and REINFORCE++.
"""

from __future__ import annotations

import logging

from hydraflow.data.loader import PromptLoader
from hydraflow.tracking.endings import DONE, VALIDATED
from hydraflow.tracking.run_folder import RunFolder
from hydraflow.tracking.trackers import Trackers
from hydraflow.trainer.checkpoint import Checkpointer
from hydraflow.trainer.clock import Clock, GracePeriodOver
from hydraflow.trainer.config import TrainerConfig
from hydraflow.trainer.ppo import PPOTrainer
from hydraflow.trainer.rollout_only import RolloutTrainer
from hydraflow.trainer.validation import Validator

logger = logging.getLogger(__name__)


class Loop:
    """Runs the steps and everything between them; `validator` is None where there are no held-out prompts."""

    def __init__(
        self,
        config: TrainerConfig,
        trainer: PPOTrainer | RolloutTrainer,
        validator: Validator | None,
        trackers: Trackers,
        folder: RunFolder,
        clock: Clock,
        *,
        restarts: int = 0,
    ):
        self.config, self.trainer, self.validator = config, trainer, validator
        self.trackers, self.folder, self.clock, self.restarts = trackers, folder, clock, restarts

    def fit(
        self, loader: PromptLoader, checkpoints: Checkpointer | None, total_steps: int, *, done: int = 0
    ) -> str:
        """Trains until the steps or the time are used up; returns why it ended. `done`: steps of earlier
        starts of the run. `checkpoints` None: nothing is saved.

        A step is logged before it is saved: a checkpoint is never ahead of the metrics.
        """
        self.trainer.sync_weights().get()
        if self.config.val_before_train and not done:
            metrics = self._validate(0)
            if metrics or not self.clock.preempted:  # a validation that was given up has nothing to log
                self.trackers.log(metrics, step=0)
        if self.clock.preempted:
            return self.clock.why_to_stop()
        for step in range(done + 1, total_steps + 1):
            try:
                with self.trainer.runtime.profiled(step):
                    metrics = self.trainer.step(loader.next_batch(), step, self.clock.check_grace_period)
            except GracePeriodOver:
                loader.put_back()
                self._give_up(step, checkpoints, done=done)
                return self.clock.why_to_stop()
            why = DONE if step == total_steps else self.clock.why_to_stop()
            if why == DONE or (why and not self.clock.preempted) or self.config.validates_after(step):
                metrics |= self._validate(step)
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
        self.trainer.sync_weights().get()
        metrics = self._validate(step)
        if not metrics and self.clock.preempted:
            return self.clock.why_to_stop()
        self.trackers.log(metrics, step=step)
        return VALIDATED

    def _give_up(self, step: int, checkpoints: Checkpointer | None, *, done: int) -> None:
        """Abandons a step, and saves the state before it unless that is already saved."""
        logger.warning("step %d is given up: its rewards are late, and the run must end", step)
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
        if self.validator is None:
            return {}
        try:
            with (
                self.trainer.timer.phase("testing"),
                self.trainer.runtime.interruptible(self.clock.check_grace_period),
            ):
                metrics, samples = self.validator.run(step)
        except GracePeriodOver:
            logger.warning(
                "the validation after step %d is given up: it has no samples or no rewards yet, and the run"
                " must end",
                step,
            )
            return {}
        if samples:
            self.folder.write_samples(step, samples)
            self.trackers.log_samples(samples, step)
        return metrics | self.trainer.timer.drain()
