"""Finds the checkpoint to resume from, if any, and restores it.

In: resume_mode, the run folder, the run's identity. Out: a `ResumePoint`, or None for a run that starts from
scratch; ConfigError, before anything starts, for a checkpoint of another configuration, a path without a
checkpoint, and a folder whose checkpoints are all damaged. A checkpoint may come from anyone, so nothing in
it is executed (`engine/dcp_index.py`). Left out on purpose: choosing the folder (`jobs/run_start.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydraflow.data.loader import PromptLoader
from hydraflow.dispatch.group import RoleGroup
from hydraflow.engine.base import CHECKPOINT_FACTS
from hydraflow.engine.dcp_index import read_tensors_alone
from hydraflow.errors import ConfigError, Problem
from hydraflow.system.paths import expanded
from hydraflow.trainer.checkpoint import RoleCheckpoints
from hydraflow.trainer.checkpoint_store import CheckpointStore, damage
from hydraflow.trainer.config import LoopConfig
from hydraflow.trainer.identity import Identity
from hydraflow.trainer.run_state import RunState
from hydraflow.workers.engine_worker import EngineWorker

MODE, PATH, FOLDER = "trainer.resume_mode", "trainer.resume_from_path", "trainer.default_local_dir"
FRESH = f"{FOLDER}=<another folder> or {MODE}=disable"
OTHER = f"{PATH}=<another checkpoint>, or start over: {FRESH}"


@dataclass(frozen=True)
class ResumePoint:
    """A complete checkpoint to resume from."""

    checkpoint: Path
    state: RunState
    skipped: Mapping[int, str]
    """Steps whose checkpoints are incomplete or damaged -> why."""

    @property
    def step(self) -> int:
        """Training steps that are done."""
        return self.state.step


@dataclass(frozen=True)
class CheckpointRequirements:
    """What a run requires of a checkpoint."""

    identity: Identity
    roles: Mapping[str, RoleCheckpoints]
    """What each role loads from it."""
    total_steps: int
    loader: PromptLoader | None = None
    """The training rows; None: not known before the run starts."""
    looks_only: str | None = None
    """The key that makes this a run that trains nothing and leaves other runs' folders untouched."""


def find(folder: Path, trainer: LoopConfig, required: CheckpointRequirements) -> ResumePoint | None:
    """The checkpoint to resume from in a given run folder.

    With resume_path, a run that already resumed from that path continues from its own newest checkpoint.
    """
    if trainer.resume_mode == "disable":
        return None
    path = expanded(trainer.resume_from_path or "").resolve()
    if required.looks_only:
        return _looked_at(folder, path if trainer.resume_mode == "resume_path" else None, required)
    if trainer.resume_mode == "auto":
        return checked(newest(folder, required), required)
    own = newest(folder, required) if CheckpointStore(folder).steps() else None
    if own is not None and own.state.origin == str(path):
        return checked(own, required)
    return checked(_at(path, required), required)


def newest(folder: Path, required: CheckpointRequirements) -> ResumePoint | None:
    """The newest complete checkpoint of a folder; None: it has no checkpoints. ConfigError when all are
    damaged."""
    store = CheckpointStore(folder)
    step, wrong = store.newest_whole(required.roles)
    if step is not None:
        return ResumePoint(store.path(step), RunState.read(store.path(step)), wrong)
    if wrong:
        rules = [f"global_step_{number} cannot be used: {why}" for number, why in wrong.items()]
        raise ConfigError([Problem(FOLDER, folder, rule, FRESH) for rule in rules])
    return None


def _looked_at(folder: Path, path: Path | None, required: CheckpointRequirements) -> ResumePoint | None:
    """The checkpoint to validate; None: the model as configured. Refuses the folder of a run, whose files
    would be moved away."""
    store = CheckpointStore(folder)
    steps = store.steps()
    if steps or (path is not None and folder in path.parents):
        rule = f"belongs to a run with checkpoints; {required.looks_only}=true needs a run folder of its own"
        remedy = f"{FOLDER}=<another folder>"
        if required.roles:
            remedy += f" {MODE}=resume_path {PATH}={path or store.path(steps[-1])}"
        raise ConfigError.one(FOLDER, folder, rule, remedy)
    return None if path is None else checked(_at(path, required), required)


def _at(path: Path, required: CheckpointRequirements) -> ResumePoint:
    remedy = f"{PATH}=<run folder>/global_step_N"
    if not os.path.isdir(path):
        raise ConfigError.one(PATH, path, "is not a folder, or cannot be read", remedy)
    if found := damage(path, required.roles):
        raise ConfigError.one(PATH, path, f"is not a complete checkpoint: {found}", remedy)
    return ResumePoint(path, RunState.read(path), {})


def checked(found: ResumePoint | None, required: CheckpointRequirements) -> ResumePoint | None:
    """The checkpoint, if any. ConfigError when the run cannot resume from it: another configuration or other
    rows, parts that it does not hold, or files that are not tensors alone."""
    if found is None:
        return None
    problems = required.identity.differences(found.state.configuration, where=str(found.checkpoint))
    if problems:
        last = problems[-1]
        problems[-1] = Problem(last.field, last.value, last.rule, f"{last.remedy}; or start over: {FRESH}")
        raise ConfigError(problems)
    if required.loader is not None:
        required.loader.require_same(found.state.data)
    lacking = [_missing_contents(found.checkpoint, role, wanted) for role, wanted in required.roles.items()]
    if problems := [problem for problem in lacking if problem is not None]:
        raise ConfigError(problems)
    for role in required.roles:
        read_tensors_alone(found.checkpoint / role)  # as its workers will, but before anything starts
    return found


def _missing_contents(checkpoint: Path, role: str, required: RoleCheckpoints) -> Problem | None:
    """A problem if the checkpoint was saved without parts that the run loads, such as the optimizer."""
    config, key = required.config, f"{required.key}.load_contents"
    held = _facts(checkpoint, role)["contents"]
    absent = [name for name in config.load_contents if name not in held]
    there = [name for name in config.load_contents if name in held]
    rule = f"{checkpoint / role} was saved without {', '.join(absent)}"
    return Problem(key, config.load_contents, rule, f"{key}=[{','.join(there)}]") if absent else None


def load_roles(
    found: ResumePoint, groups: Mapping[str, RoleGroup], roles: Mapping[str, RoleCheckpoints]
) -> list[str]:
    """Restores every role's state; returns one line per role on what was loaded."""
    lines = []
    for role, group in groups.items():
        contents = list(roles[role].config.load_contents)
        group.call(EngineWorker.load_checkpoint, str(found.checkpoint / role), contents)
        ranks = _facts(found.checkpoint, role)["world_size"]
        loaded = ", ".join(WORDS[name] for name in contents)
        lines.append(f"{role}: {loaded}; written by {ranks} ranks, read by {group.world_size}")
    return lines


WORDS = {
    "model": "weights",
    "optimizer": "optimizer",
    "extra": "place in the schedule",
    "hf_model": "full weights",
}


def _facts(checkpoint: Path, role: str) -> dict[str, Any]:
    file = checkpoint / role / CHECKPOINT_FACTS
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError.one(str(file), None, f"cannot be read: {error}", OTHER) from error
    is_complete = isinstance(found, dict) and {"contents", "world_size"} <= found.keys()
    if not is_complete or not isinstance(found["contents"], list):
        raise ConfigError.one(str(file), None, "lacks the checkpoint's contents or world_size", OTHER)
    return found
