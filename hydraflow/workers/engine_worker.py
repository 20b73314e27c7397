"""Shared by every role with a training engine: joining the process group, mesh coordinates, checkpoints.

In: the role's specification. Out: an engine of the chosen kind. Left out on purpose: what the role does with
it; updates (`training.py`).
"""

from __future__ import annotations

import time
from pathlib import Path

from safetensors import SafetensorError

from hydraflow.batch_plan.parts import MicroPlan
from hydraflow.device import resolve_dtype
from hydraflow.dispatch.modes import Dispatch, mesh_mode, register
from hydraflow.dispatch.worker import ProcessContext, Worker
from hydraflow.engine.base import TrainEngine
from hydraflow.engine.config import TRAIN_ENGINES, EngineConfig, OptimConfig
from hydraflow.engine.micro_batcher import MicroBatcher
from hydraflow.errors import EnvironmentFault, first_line
from hydraflow.metrics import Metric
from hydraflow.models.ask import LOG_PROBS, Ask
from hydraflow.models.config import ModelConfig
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.coordinates import Coordinates
from hydraflow.workers.joining import join_group
from hydraflow.workers.saving import save_part
from hydraflow.workers.utilization import ModelWork, Utilization

DATA_RANKS = mesh_mode("data")
"""Divides rows by the engine's data ranks."""


class EngineWorker(Worker):
    """One process of a training engine, in `engine`; without `optim` the weights are frozen.

    `strategy` names the engine; `head` is policy or value; `field` is the configuration key of `model`, for
    messages; `seed` seeds the initialisation of new weights (adapters).
    """

    def __init__(
        self,
        process: ProcessContext,
        strategy: str,
        model: ModelConfig,
        settings: EngineConfig,
        optim: OptimConfig | None = None,
        *,
        head: str,
        total_steps: int = 1,
        field: str,
        seed: int = 0,
    ):
        super().__init__(process)
        join_group(process)
        self.micro_batchers: list[MicroBatcher] = []
        """Micro-batchers of all passes of the model."""
        device = process.device()
        self.engine: TrainEngine = TRAIN_ENGINES[strategy].load()(
            model, settings, optim, head=head, device=device, total_steps=total_steps, field=field, seed=seed
        )
        self.engine.rest()
        self.utilization = Utilization(
            ModelWork.of(model, head, field),
            device,
            resolve_dtype(settings.product_dtype, device.type),
            process.world_size // self.engine.coordinates().data_size,
        )

    def micro_batcher(self, plan: MicroPlan, what: str) -> MicroBatcher:
        """Creates the micro-batcher of one kind of pass; `what` names the pass in messages."""
        self.micro_batchers.append(MicroBatcher(plan, what))
        return self.micro_batchers[-1]

    def infer(
        self, rows: DataProto, batcher: MicroBatcher, ask: Ask = LOG_PROBS, *, name: str, adapter: bool = True
    ) -> DataProto:
        """The engine's `forward_rows`, whose MFU is reported as `perf/mfu/<name>_infer`."""
        start = time.perf_counter()
        output = self.engine.forward_rows(rows, batcher, ask, adapter=adapter)
        self.utilization.note(f"{name}_infer", rows, time.perf_counter() - start)
        return output

    @register(dispatch_mode=DATA_RANKS, blocking=False)
    def utilization_metrics(self) -> dict[str, Metric]:
        """`perf/mfu/<name>` of what a model that is not trained has done since the last call."""
        return self.utilization.metrics()

    def mesh_coordinates(self, mesh: str) -> Coordinates:
        """Which share of a batch this process gets; results come from one process of each share."""
        return self.engine.coordinates()

    def after_call(self) -> None:
        """Offloads, to make room for the device's other roles."""
        self.engine.rest()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rest(self) -> None:
        """Returns when all earlier calls have ended and `after_call` has offloaded."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_hf(self, directory: str) -> None:
        try:
            self.engine.save_hf(directory)
        except (OSError, SafetensorError) as error:
            text = f"the model cannot be written to {directory}: {first_line(error)}"
            remedy = "make room, then start the same command again"
            raise EnvironmentFault(f"{text}\n      -> {remedy}") from error

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
    def checkpoint_bytes(self, contents: list[str]) -> int:
        """Bytes of this rank's part of a checkpoint."""
        return self.engine.stored_bytes(contents)
