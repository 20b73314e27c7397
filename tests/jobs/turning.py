"""A generation process and one of a reward model that note what they do."""

from __future__ import annotations

from pathlib import Path

from hydraflow.dispatch.modes import Dispatch, mesh_mode, register
from hydraflow.protocol.batch import DataProto
from hydraflow.weights.buckets import FlatBucket
from hydraflow.workers.engine_worker import DATA_RANKS
from hydraflow.workers.reward_model import RewardModelWorker
from hydraflow.workers.rollout import RolloutWorker


def noting_workers(notes: Path) -> tuple[type[RolloutWorker], type[RewardModelWorker]]:
    """Classes for one process each; `notes` gets a line when a call begins, and `.` when it has ended."""

    def note(text: str) -> None:
        with notes.open("a") as file:
            file.write(text)

    class NotingRollout(RolloutWorker):
        @register(dispatch_mode=mesh_mode("rollout"), blocking=False, read_only=True)
        def generate(self, batch: DataProto) -> DataProto:
            note("\nsamples")
            sampled = super().generate(batch)
            note(".")
            return sampled

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def sleep(self) -> None:
            super().sleep()
            note("\nsleeps.")

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def load_weights(self) -> None:
            note("\nloads")
            super().load_weights()
            note(".")

        def _load(self, bucket: FlatBucket) -> None:
            super()._load(bucket)
            if bucket.header.last:
                note("\nloads.")

    class NotingModel(RewardModelWorker):
        @register(dispatch_mode=DATA_RANKS, blocking=False, read_only=True)
        def compute_scores(self, batch: DataProto) -> DataProto:
            note("\nscores")
            scored = super().compute_scores(batch)
            note(".")
            return scored

    return NotingRollout, NotingModel
