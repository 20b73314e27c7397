"""Shared by every role with a training engine: joining the process group, mesh coordinates, updates,
checkpoints.

In: the role's specification. Out: an engine of the chosen kind. Left out on purpose: what the role does with
it.
"""

from __future__ import annotations

from pathlib import Path

from hydraflow.batch_plan.parts import MicroPlan, RolePlan
from hydraflow.device import current_device
from hydraflow.dispatch.modes import Coordinates, Dispatch, register
from hydraflow.dispatch.worker import ProcessContext, Worker
from hydraflow.engine.base import TrainEngine
from hydraflow.engine.config import TRAIN_ENGINES, EngineConfig, OptimConfig
from hydraflow.models.config import ModelConfig
from hydraflow.workers.joining import join_group
from hydraflow.workers.micro_batcher import MicroBatcher
from hydraflow.workers.saving import save_part
from hydraflow.workers.skipping import SkipGuard, SkipLimits
from hydraflow.workers.training import Learner


class EngineWorker(Worker):
    """One process of a training engine, in `engine`; an `optim` of None freezes the weights.

    `strategy` names the engine, `head` is policy or value, `field` the configuration key of `model`, for
    messages; `seed` seeds the initialisation of new weights (adapters).
    """

    learner: Learner
    """Of a role that is trained."""

    def __init__(
        self,
        process: ProcessContext,
        strategy: str,
        model: ModelConfig,
        settings: EngineConfig,
        optim: OptimConfig | None,
        *,
        head: str,
        total_steps: int,
        field: str,
        seed: int = 0,
    ):
        super().__init__(process)
        join_group(process)
        self._micro_batchers: list[MicroBatcher] = []
        device = current_device(process.device_type, process.local_rank)
        self.engine: TrainEngine = TRAIN_ENGINES[strategy].load()(
            model, settings, optim, head=head, device=device, total_steps=total_steps, field=field, seed=seed
        )
        self.engine.rest()

    def micro_batcher(self, plan: MicroPlan, what: str) -> MicroBatcher:
        """The micro-batches of one kind of pass, to be kept; `what` names it in messages."""
        self._micro_batchers.append(MicroBatcher(plan, what))
        return self._micro_batchers[-1]

    def make_learner(
        self, plan: RolePlan, limits: SkipLimits, *, what: str, role: str, prefix: str
    ) -> Learner:
        """The optimizer steps of this model. `what` names their pass in messages, `role` the model in
        messages and files, `prefix` its metrics."""
        skip_guard = SkipGuard(limits, role, self.process.rank)
        micro_batcher = self.micro_batcher(plan.micro, what)
        return Learner(self.engine, plan, micro_batcher, skip_guard, prefix, self._micro_batchers)

    def mesh_coordinates(self, mesh: str) -> Coordinates:
        """Which share of a batch this process gets; results are collected from one process of each
        share."""
        return Coordinates(self.engine.data_rank, self.engine.data_size, self.engine.is_collect)

    def after_call(self) -> None:
        """Makes room for the other roles of the device."""
        self.engine.rest()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_hf(self, directory: str) -> None:
        """Writes the weights as a Hugging Face directory."""
        self.engine.save_hf(directory)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, checkpoint: str, role: str, contents: list[str], background: bool) -> None:
        """Copies the state and writes it to `<checkpoint>/<role>`, in the background if asked;
        `saving.read_part` gives the outcome."""
        save_part(
            self.engine.snapshot(contents), Path(checkpoint), role, self.process.rank, background=background
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, directory: str, contents: list[str]) -> None:
        """Loads the state from a role's folder."""
        self.engine.load(directory, contents)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def skip_step(self) -> None:
        """A training step without a row to train on: only the learning rate moves on."""
        self.engine.lr_step()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def skipped_in_a_row(self) -> int:
        """Optimizer steps skipped since the last successful one; the same on every rank."""
        return self.learner.skip_guard.in_a_row

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count_skipped_from(self, in_a_row: int) -> None:
        """Restores the count that `skipped_in_a_row` had when the checkpoint was saved."""
        self.learner.skip_guard.in_a_row = in_a_row

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_bytes(self, contents: list[str]) -> int:
        """Bytes of this rank's part of a checkpoint."""
        return self.engine.stored_bytes(contents)
