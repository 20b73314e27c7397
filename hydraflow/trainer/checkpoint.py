"""Decides after each step what to save, and writes it in the background while the next steps run.

In: a step that is done and logged. Out: a complete checkpoint in the store, and the pointer moved to it. The
roles copy their state to host memory before `after` returns; a thread here waits for their files, seals the
checkpoint and moves the pointer. Left out on purpose: files and names (`checkpoint_store.py`), restoring
(`resume.py`).
"""

from __future__ import annotations

import logging
import math
import operator
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydraflow.dispatch.group import RoleGroup
from hydraflow.dispatch.head import HeadLost
from hydraflow.errors import ConfigError, EnvironmentFault, HydraflowError, WorkerError
from hydraflow.trainer.checkpoint_store import CheckpointStore
from hydraflow.trainer.config import LoopConfig
from hydraflow.workers.config import CheckpointConfig
from hydraflow.workers.engine_worker import EngineWorker
from hydraflow.workers.saving import FileInfo, RankFiles, read_part

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
LEAVE_SECONDS = 10.0
"""Seconds that a run whose workers are gone waits for the disk before it ends."""
READ_RETRY_SECONDS = 35.0
"""Seconds for which an unreadable part is retried: NFS may serve a stale directory listing for 30 seconds."""


@dataclass(frozen=True)
class RoleCheckpoints:
    """What a role saves, and how long it is kept."""

    key: str
    """Configuration key of `config`."""
    config: CheckpointConfig
    keep: int | None
    """Number of checkpoints to keep; None: all."""
    keep_key: str
    """Configuration key of `keep`."""


class Checkpointer:
    """Saves one checkpoint at a time. A context manager: leaving it finishes the one being written, unless
    the workers are gone.

    `describe` returns the run's state after a step, as plain values.
    """

    def __init__(
        self,
        trainer: LoopConfig,
        store: CheckpointStore,
        groups: Mapping[str, RoleGroup],
        roles: Mapping[str, RoleCheckpoints],
        describe: Callable[[int], Mapping[str, Any]],
        undisturbed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """`undisturbed`: context of a save after a preemption, which must not wait for other roles."""
        self.trainer, self.store, self.groups = trainer, store, groups
        self.undisturbed = undisturbed
        self.roles, self.describe = roles, describe
        self._best = store.best()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[str] | None = None
        self._given_up = threading.Event()

    def after(self, step: int, metrics: Mapping[str, float], *, last: bool, preempted: bool) -> None:
        """Saves what is due after a step; `last`: the last step of this start. Raises EnvironmentFault as
        `settle` does."""
        # the best so far is not known while a save may still fail
        if self._pending is not None and (self._pending.done() or self.trainer.keep_best in metrics):
            self.settle()
        regular = preempted or (self.trainer.save_freq > 0 and (last or step % self.trainer.save_freq == 0))
        score = self._new_best(metrics)
        if regular or score is not None:
            with self.undisturbed() if preempted else nullcontext():
                self._save(step, regular, score)

    def compare(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keeps the checkpoint of an earlier start as the best if a validation made up for says so."""
        if self.has(step) and (score := self._new_best(metrics)) is not None:
            whole, name = self.store.path(step), str(self.trainer.keep_best)
            try:
                self.store.publish_best(whole, step, name, score, linked=True)
            except OSError as error:
                self._best = self.store.best()
                logger.warning("the checkpoint of step %d could not be kept as the best: %s", step, error)

    def settle(self) -> None:
        """Waits for the checkpoint being written. A failure is logged as a warning, or raised as
        EnvironmentFault with trainer.stop_on_failed_save."""
        if self._pending is None:
            return
        saving, self._pending = self._pending, None
        wrong = self._result(saving)
        if not wrong:
            return
        self._best, pointer = self.store.best(), self.store.pointer()
        if self.trainer.stop_on_failed_save:
            raise EnvironmentFault(f"{wrong} (trainer.stop_on_failed_save=true)")
        left = "there is no checkpoint yet" if pointer is None else f"the last one is of step {pointer}"
        logger.warning("%s; training continues, and %s", wrong, left)

    def has(self, step: int) -> bool:
        """Whether the newest checkpoint is of that step. EnvironmentFault as in `settle`."""
        self.settle()
        return self.store.pointer() == step

    def _result(self, saving: Future[str]) -> str:
        """The error of a save, empty if none. The parts have the time limit of any call, and the disk has as
        long again."""
        limit = 2 * self.trainer.rpc_timeout
        try:
            return saving.result(limit)
        except TimeoutError:
            text = f"a checkpoint in {self.store.folder} is not on the disk after {limit:g} seconds"
            why = "the disk does not answer (twice trainer.rpc_timeout)"
            raise EnvironmentFault(f"{text}: {why}") from None

    def require_space(self, total_steps: int, done: int) -> None:
        """Raises ConfigError when the disk has no room for two checkpoints (or for the only one planned); the
        space of an earlier start's checkpoint that will be removed counts as free."""
        if self.trainer.save_freq <= 0 or total_steps <= done:
            return
        planned = math.ceil((total_steps - done) / self.trainer.save_freq)
        sizes = {
            name: sum(group.call(EngineWorker.checkpoint_bytes, self._contents(name)))
            for name, group in self.groups.items()
        }
        size = max(1, sum(sizes.values()))
        free = shutil.disk_usage(self.store.folder).free
        there = len(self.store.steps())
        needed = wanted = 0
        for name, bytes_each in sizes.items():
            keep = self.roles[name].keep
            # + 1: the oldest is removed after the newest is complete
            most = planned if keep is None else min(planned, keep + 1 - min(there, keep))
            needed += bytes_each * min(2, most)
            wanted += bytes_each * most
        room = (
            f"a checkpoint takes {size / 2**30:.3g} GiB, {planned} are planned, and {self.store.folder} has"
            f" room for {free // size}"
        )
        limits = " ".join(f"{role.keep_key}=1" for role in self.roles.values())
        if free < needed:
            remedy = "trainer.default_local_dir=<a folder on a larger disk>"
            raise ConfigError.one("trainer.save_freq", self.trainer.save_freq, room, remedy)
        if free < wanted:
            logger.warning("%s: keep fewer (%s) or save less often", room, limits)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        workers_live = error is None or (
            isinstance(error, HydraflowError) and not isinstance(error, WorkerError | HeadLost)
        )
        if not workers_live:
            self._given_up.set()
        try:
            if error is None:
                self.settle()
            elif self._pending is not None:
                wait([self._pending], 2 * self.trainer.rpc_timeout if workers_live else LEAVE_SECONDS)
                if self._pending.done() and (wrong := self._pending.exception() or self._pending.result()):
                    logger.warning("%s", wrong)
        finally:
            self._thread.shutdown(wait=False)

    def _new_best(self, metrics: Mapping[str, float]) -> float | None:
        """Records and returns the validation score if it is the best so far, else returns None; for a loss,
        smaller is better."""
        name, best = self.trainer.keep_best, self._best
        if name is None or (value := metrics.get(name)) is None or math.isnan(value):
            return None
        is_better = operator.lt if name.endswith("loss") else operator.gt
        if best is not None and best["metric"] == name and not is_better(value, best["value"]):
            return None
        self._best = {"metric": name, "value": value}
        return value

    def _save(self, step: int, regular: bool, score: float | None) -> None:
        self.settle()
        ranks = {name: group.world_size for name, group in self.groups.items()}
        try:
            unfinished = self.store.begin(step, ranks, self.describe(step))
        except OSError as error:
            self._pending = Future()  # `settle` reports it as any other failure
            self._pending.set_result(f"the checkpoint of step {step} could not be started: {error}")
            return
        for name, group in self.groups.items():
            contents, background = self._contents(name), self.roles[name].config.async_save
            group.call(EngineWorker.save_checkpoint, str(unfinished), name, contents, background)
        self._pending = self._thread.submit(self._finish, unfinished, step, ranks, regular, score)
        if not any(role.config.async_save for role in self.roles.values()):
            self.settle()

    def _contents(self, role: str) -> list[str]:
        return list(self.roles[role].config.save_contents)

    # --- in the thread --------------------------------------------------

    def _finish(
        self, unfinished: Path, step: int, ranks: Mapping[str, int], regular: bool, score: float | None
    ) -> str:
        """Waits for all parts and publishes the checkpoint; returns the error, empty if none."""
        try:
            wrong, files = self._wait(unfinished, ranks)
            if not wrong:
                self.store.seal(unfinished, step, files)
                self._publish(unfinished, step, regular, score)
        except OSError as error:
            wrong = str(error)
        if not wrong:
            return ""
        shutil.rmtree(unfinished, ignore_errors=True)  # the next one needs the space
        return f"the checkpoint of step {step} could not be saved: {wrong}"

    def _wait(self, unfinished: Path, ranks: Mapping[str, int]) -> tuple[str, dict[str, FileInfo]]:
        missing = [(role, rank) for role, size in ranks.items() for rank in range(size)]
        files: dict[str, FileInfo] = {}
        first_errors: dict[tuple[str, int], float] = {}
        deadline = time.monotonic() + self.trainer.rpc_timeout
        wrong = ""
        while missing:
            for role, rank in list(missing):
                part = self._part(unfinished, role, rank, first_errors)
                if part is not None:
                    missing.remove((role, rank))
                    files |= part.files
                    wrong = wrong or part.error
            if self._given_up.is_set():
                return "the run ended", files
            if missing and time.monotonic() > deadline:
                role, rank = missing[0]
                return f"{role} rank {rank} did not finish in {self.trainer.rpc_timeout:g} seconds", files
            if missing:
                self._given_up.wait(POLL_SECONDS)
        return wrong, files

    def _part(
        self, unfinished: Path, role: str, rank: int, first_errors: dict[tuple[str, int], float]
    ) -> RankFiles | None:
        """A rank's part; None: it is still being written, or a read error may be transient. `first_errors`:
        time of each rank's first read error."""
        try:
            return read_part(unfinished, role, rank)
        except (OSError, ValueError) as error:
            since = first_errors.setdefault((role, rank), time.monotonic())
            if time.monotonic() - since < READ_RETRY_SECONDS:
                return None
            return RankFiles({}, f"{role} rank {rank}: {error}")

    def _publish(self, sealed: Path, step: int, regular: bool, score: float | None) -> None:
        """Moves the pointer last, so that a run interrupted before that does all of this again."""
        whole = self.store.name(sealed, step) if regular else sealed
        try:
            if score is not None:
                self.store.publish_best(whole, step, str(self.trainer.keep_best), score, linked=regular)
            if regular:
                self.store.point_to(step)
        except OSError:
            # an earlier start may have saved the step, and moved the pointer
            if self.store.pointer() != step:
                shutil.rmtree(whole, ignore_errors=True)  # the next one needs the space
            raise
        if regular:
            try:
                self.store.thin_out({name: role.keep for name, role in self.roles.items()})
            except OSError as error:
                logger.warning("old checkpoints could not be removed: %s", error)
