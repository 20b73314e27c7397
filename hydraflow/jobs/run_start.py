"""Where a run begins: its folder, which it locks, and the checkpoint that it goes on from.

In: resume_mode, default_local_dir, what shapes the run. Out: a `RunStart`. What an earlier start of the same
run noted after the checkpoint is forgotten, since it will be done again; what another run left in the folder
is set aside.

Without default_local_dir, `auto` means: the newest folder runs/<experiment_name>-* of which the same
configuration was cut off, where nobody is at work and from which a whole checkpoint can be had; a new folder
if there is none.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from hydraflow.errors import ConfigError
from hydraflow.tracking.endings import DONE
from hydraflow.tracking.run_folder import FIELD, RunFolder
from hydraflow.tracking.run_lock import RunLock
from hydraflow.trainer.checkpoint_store import BEST, CheckpointStore
from hydraflow.trainer.config import LoopConfig
from hydraflow.trainer.resume import Resumption, Wanted, find, newest
from hydraflow.trainer.run_state import RunState


@dataclass(frozen=True)
class RunStart:
    """A locked run folder."""

    folder: RunFolder
    lock: RunLock
    found: Resumption | None
    """What the run goes on from; None: it starts anew."""
    run_id: str
    """Identity in trackers."""
    notes: tuple[str, ...] = ()
    """What was done to the folder, for people."""

    @property
    def step(self) -> int:
        """Training steps that are done."""
        return self.found.step if self.found else 0

    def is_done(self, total_steps: int) -> bool:
        """Whether nothing is left to do: all steps were done and the run said so."""
        why, steps = self.folder.ended_with()
        return self.found is not None and self.step >= total_steps and why == DONE and steps >= total_steps


def begin(trainer: LoopConfig, wanted: Wanted) -> RunStart:
    """Settles folder and checkpoint. ConfigError when the folder is in use, or as `resume.find` says; then
    nothing was changed."""
    continues = trainer.default_local_dir is None and trainer.resume_mode == "auto" and not wanted.looks_only
    if continues and (cut_off := _cut_off(trainer, wanted)):
        return cut_off
    folder = RunFolder.make(trainer.default_local_dir, trainer.experiment_name)
    lock = RunLock(folder.path, field=FIELD)
    try:
        return _start(folder, lock, find(folder.path, trainer, wanted))
    except ConfigError:
        lock.release()
        raise


def take_back(start: RunStart) -> RunStart:
    """Makes the folder fit to go on from the checkpoint: what came after it goes, or aside; the pointer names
    it."""
    assert start.found is not None
    store, found = CheckpointStore(start.folder.path), start.found
    store.clear_leftovers()
    notes = [f"global_step_{step} is passed over: {why}" for step, why in found.passed_over.items()]
    if not _lies_in(found.checkpoint, start.folder.path):
        start.folder.set_earlier_run_aside()
        return replace(start, notes=tuple(notes))
    notes += [f"set aside: {path}" for path in store.set_aside(found.step, found.passed_over)]
    store.point_to(found.step if found.checkpoint == store.path(found.step) else None)
    dropped = start.folder.go_back_to(found.step)
    notes += (
        [f"metrics: {dropped} {'line' if dropped == 1 else 'lines'} after step {found.step} dropped"]
        if dropped
        else []
    )
    return replace(start, notes=tuple(notes))


def _start(folder: RunFolder, lock: RunLock, found: Resumption | None) -> RunStart:
    if found is None:
        CheckpointStore(folder.path).clear_leftovers()
        folder.set_earlier_run_aside()
    same_run = found is not None and _lies_in(found.checkpoint, folder.path)
    run_id = (
        found.state.run_id if found is not None and same_run else f"{folder.path.name}-{secrets.token_hex(4)}"
    )
    return RunStart(folder, lock, found, run_id)


def _lies_in(checkpoint: Path, folder: Path) -> bool:
    return checkpoint.parent in (folder, folder / BEST)


def _cut_off(trainer: LoopConfig, wanted: Wanted) -> RunStart | None:
    """The newest run of this experiment that ended before its end."""
    for folder in RunFolder.of_experiment(trainer.experiment_name):
        if not _may_go_on(folder, wanted):
            continue
        try:
            lock = RunLock(folder.path, field=FIELD)
        except ConfigError:
            continue
        start = _start_in(folder, lock, wanted)
        if start is not None and not start.is_done(wanted.total_steps):
            return start
        lock.release()
    return None


def _may_go_on(folder: RunFolder, wanted: Wanted) -> bool:
    """What the newest checkpoint says of itself: to verify it is to read all of it, which old runs are not
    worth."""
    store = CheckpointStore(folder.path)
    if not store.steps():
        return False
    try:
        state = RunState.read(store.path(store.steps()[-1]))
    except ConfigError:
        return True  # damaged; there may be a whole one before it
    why, steps = folder.ended_with()
    return not wanted.identity.differences(state.configuration, where="") and not (
        why == DONE and steps >= wanted.total_steps
    )


def _start_in(folder: RunFolder, lock: RunLock, wanted: Wanted) -> RunStart | None:
    try:
        found = newest(folder.path, wanted)
    except ConfigError:
        return None
    if found is None or wanted.identity.differences(found.state.configuration, where=""):
        return None
    return _start(folder, lock, found)
