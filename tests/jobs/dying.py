"""Generation processes that die or hang at chosen moments."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

import psutil

from hydraflow.dispatch.modes import Dispatch, register
from hydraflow.protocol.batch import DataProto
from hydraflow.weights.buckets import FlatBucket
from hydraflow.workers.rollout import RolloutWorker


def shared_files() -> str:
    """Files in shared memory that this process uses, a line each."""
    found = {file.path for file in psutil.Process().memory_maps() if file.path.startswith("/dev/shm/")}
    return "\n".join(sorted(path for path in found if Path(path).exists()))


def left_in_memory(folder: Path) -> list[str]:
    """Those of `shared_files` noted in `folder` that are still there."""
    notes = [*folder.glob("died *"), *folder.glob("process *")]
    return [path for note in notes for path in note.read_text().split("\n") if path and Path(path).exists()]


def noting_worker(folder: Path, base: type[RolloutWorker] = RolloutWorker) -> type[RolloutWorker]:
    """A class whose processes each note their id in `folder`, with the shared files of an engine that gets
    weights."""

    class Noting(base):  # type: ignore[misc, valid-type]
        def _take(self, compare: bool, bucket: FlatBucket) -> str | None:
            (folder / f"process {os.getpid()}").write_text(shared_files())
            return super()._take(compare, bucket)  # type: ignore[no-any-return]

    return Noting


def dying_worker(deaths: Mapping[str, int], folder: Path, version: int = 0) -> type[RolloutWorker]:
    """A class whose process of rank 0 is killed so often at each of these moments, noted in `folder`:

    idle       0.2 s after it has sampled with weights of `version`
    receiving  in the middle of those of the next version
    sampling   with the next version's
    """

    def die(moment: str) -> None:
        for time in range(deaths.get(moment, 0)):
            note = folder / f"died {moment} {time}"
            if not note.exists():
                note.write_text(shared_files())
                os.kill(os.getpid(), signal.SIGKILL)

    class Dying(RolloutWorker):
        def _take(self, compare: bool, bucket: FlatBucket) -> str | None:
            if self.process.rank == 0 and bucket.header.version == version + 1 and bucket.header.number == 1:
                die("receiving")
            return super()._take(compare, bucket)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, read_only=True, resend=False)
        def advance(self, batch: DataProto | None, to_the_end: bool) -> DataProto | None:
            sampled = super().advance(batch, to_the_end)
            if self.process.rank == 0 and self.version == version:
                threading.Timer(0.2, die, ("idle",)).start()
            if self.process.rank == 0 and self.version == version + 1:
                die("sampling")
            return sampled

    return Dying


def hanging_worker(folder: Path) -> type[RolloutWorker]:
    """A class whose process of rank 1 stops in its first call of `advance`. Every process notes its id in
    `folder`."""

    class Hanging(RolloutWorker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, read_only=True, resend=False)
        def advance(self, batch: DataProto | None, to_the_end: bool) -> DataProto | None:
            (folder / f"process {os.getpid()}").write_text(shared_files())
            if self.process.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            return super().advance(batch, to_the_end)

    return Hanging
