"""Chooses and locks the run folder, and finds the checkpoint to resume from.

In: resume_mode, default_local_dir, the run's identity. Out: a `RunStart`. Metrics that an earlier start of
the same run logged after the checkpoint are dropped, because those steps run again; files of another run in
the folder are moved away.

Without default_local_dir, `auto` takes the newest folder runs/<experiment_name>-* in which a run of the same
configuration was interrupted, no process is running and a complete checkpoint exists; otherwise a new folder.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydraflow.errors import ConfigError
from hydraflow.system.paths import expanded
from hydraflow.tracking.endings import DONE
from hydraflow.tracking.run_folder import RunFolder
from hydraflow.tracking.run_lock import LOCK_FILE, RunLock
from hydraflow.trainer.checkpoint_store import BEST, CheckpointStore
from hydraflow.trainer.config import LoopConfig
from hydraflow.trainer.resume import CheckpointRequirements, ResumePoint, checked, find, newest
from hydraflow.trainer.run_state import RunState


@dataclass(frozen=True)
class RunStart:
    """A locked run folder."""

    folder: RunFolder
    lock: RunLock
    found: ResumePoint | None
    """The checkpoint to resume from; None: the run starts from scratch."""
    run_id: str
    """The run's id in trackers."""
    notes: tuple[str, ...] = ()
    """What was changed in the folder, as lines for the user."""

    @property
    def step(self) -> int:
        """Number of completed training steps."""
        return self.found.step if self.found else 0

    def is_done(self, total_steps: int) -> bool:
        """Whether all steps are done and the run wrote its summary: until then its final model may be
        missing."""
        why, steps = self.folder.ended_with()
        return self.continues and self.step >= total_steps and why == DONE and steps >= total_steps

    @property
    def continues(self) -> bool:
        """Whether the checkpoint is of the run in this folder."""
        return self.found is not None and _is_inside(self.found.checkpoint, self.folder.path)


def begin(trainer: LoopConfig, required: CheckpointRequirements, values: Mapping[str, Any]) -> RunStart:
    """Chooses folder and checkpoint. `values`: those of the configuration, by key. ConfigError if the folder
    is in use, as in `resume.find`, or if an earlier run cannot be moved (`RunFolder.require_movable`); then
    nothing has been changed."""
    searches = trainer.default_local_dir is None and trainer.resume_mode == "auto"
    if searches and not required.looks_only and (interrupted := _interrupted_run(trainer, required)):
        try:
            checked(interrupted.found, required)
        except ConfigError:
            interrupted.lock.release()
            raise
        return interrupted
    existed = trainer.default_local_dir is not None and os.path.isdir(expanded(trainer.default_local_dir))
    folder = RunFolder.make(trainer.default_local_dir, trainer.experiment_name)
    used = folder.was_used()
    lock = RunLock(folder.path)
    try:
        found = find(folder.path, trainer, required)
        if found is None or not _is_inside(found.checkpoint, folder.path):
            # a checkpoint to resume from is not inside, or it is not read
            read = {key: value for key, value in values.items() if key != "trainer.resume_from_path"}
            folder.require_movable(read, used=used)
        return _start(folder, lock, found)
    except ConfigError:
        lock.release()
        if not used:  # the next start must not take it for a run's
            (folder.path / LOCK_FILE).unlink(missing_ok=True)
        if not existed:
            with suppress(OSError):  # something is in it
                folder.path.rmdir()
        raise


def take_back(start: RunStart) -> RunStart:
    """Prepares the folder for resuming from the checkpoint: whatever is newer is deleted or moved away, and
    the pointer names the checkpoint."""
    assert start.found is not None
    store, found = CheckpointStore(start.folder.path), start.found
    store.clear_leftovers()
    notes = [f"global_step_{step} is skipped: {why}" for step, why in found.skipped.items()]
    if not start.continues:
        start.folder.move_earlier_run()
        return replace(start, notes=tuple(notes))
    notes += [f"moved to {path}" for path in store.set_aside(found.step, found.skipped)]
    store.point_to(found.step if found.checkpoint == store.path(found.step) else None)
    dropped = start.folder.go_back_to(found.step)
    if dropped:
        lines = "line" if dropped == 1 else "lines"
        notes.append(f"metrics: {dropped} {lines} after step {found.step} dropped")
    return replace(start, notes=tuple(notes))


def _start(folder: RunFolder, lock: RunLock, found: ResumePoint | None) -> RunStart:
    if found is None:
        CheckpointStore(folder.path).clear_leftovers()
        folder.move_earlier_run()
    if found is not None and _is_inside(found.checkpoint, folder.path):
        return RunStart(folder, lock, found, found.state.run_id)
    return RunStart(folder, lock, found, f"{folder.path.name}-{secrets.token_hex(4)}")


def _is_inside(checkpoint: Path, folder: Path) -> bool:
    return checkpoint.parent in (folder, folder / BEST)


def _interrupted_run(trainer: LoopConfig, required: CheckpointRequirements) -> RunStart | None:
    """The newest run of this experiment that did not finish."""
    for folder in RunFolder.of_experiment(trainer.experiment_name):
        if not _may_resume(folder, required):
            continue
        try:
            lock = RunLock(folder.path)
        except ConfigError:
            continue
        start = _start_in(folder, lock, required)
        if start is not None and not start.is_done(required.total_steps):
            return start
        lock.release()
    return None


def _may_resume(folder: RunFolder, required: CheckpointRequirements) -> bool:
    """Whether the run can be resumed, by the state in its newest checkpoint: verifying whole checkpoints
    would be too slow for a search through old runs."""
    store = CheckpointStore(folder.path)
    if not store.steps():
        return False
    try:
        state = RunState.read(store.path(store.steps()[-1]))
    except ConfigError:
        return True  # damaged; an older one may be complete
    why, steps = folder.ended_with()
    is_done = why == DONE and steps >= required.total_steps
    return not is_done and not required.identity.differences(state.configuration, where="")


def _start_in(folder: RunFolder, lock: RunLock, required: CheckpointRequirements) -> RunStart | None:
    try:
        found = newest(folder.path, required)
    except ConfigError:
        return None
    if found is None or required.identity.differences(found.state.configuration, where=""):
        return None
    return _start(folder, lock, found)
