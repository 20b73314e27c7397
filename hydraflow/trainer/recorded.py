"""Trajectories in files: written while a run trains, and read in place of sampling.

In: a source of trajectories, or a folder. Out: trajectories and their scores. A step that reads a file
computes what the step that wrote it computed, bit for bit: the file holds every column exactly.

    <folder>/step_12.safetensors     the columns of the trajectories, their scores, row objects

Left out on purpose: JSON for people to read (`generations.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors

from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.data.loader import PromptLoader
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.shards import CompletedFuture
from hydraflow.errors import ConfigError, EnvironmentFault
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.remote import RemoteBatch
from hydraflow.protocol.stored import read_batch, write_batch
from hydraflow.system.paths import expanded
from hydraflow.trainer.config import DebugConfig
from hydraflow.trainer.phases import TRAJECTORY
from hydraflow.trainer.source import FollowsLoader, Trajectories, TrajectorySource
from hydraflow.workers.reward import FUNCTION_MEANS, WHY_FAILED

TEXTS = ("text", "prompt_text")
"""Score columns with readable text; not stored in trajectory files."""
COLUMNS = (*TRAJECTORY, "score", "failed")
FACTS = ("scores", WHY_FAILED)
"""Columns and facts that every file of trajectories has."""
LOAD = "trainer.debug.load_rollouts"


class RecordedSource:
    """A `TrajectorySource` around another, whose trajectories it writes to a folder. The controller fetches
    all their columns for that."""

    def __init__(self, source: TrajectorySource, folder: Path, runtime: Runtime):
        self.source, self.folder, self.runtime = source, folder, runtime

    def take(self, step: int) -> Trajectories:
        """The source's trajectories, once they are scored and written. EnvironmentFault when they cannot be
        written."""
        taken = self.source.take(step)
        scored: RemoteBatch = taken.scoring.get()
        names = [name for name in scored.columns if name not in TEXTS]
        about = {name: scored.meta_info.get(name) for name in (WHY_FAILED, FUNCTION_MEANS)}
        facts = {"step": step, "scores": names} | about
        rows = RemoteBatch(dict(taken.rows.columns), taken.rows.objects).union(scored.select(names, [], []))
        try:
            write_batch(dump_file(self.folder, step), self.runtime.fetch(rows), facts)
        except OSError as error:
            text = f"the trajectories of step {step} cannot be written to {self.folder}: {error.strerror}"
            raise EnvironmentFault(text) from error
        return replace(taken, scoring=CompletedFuture(scored))

    def give_back(self) -> None:
        self.source.give_back()

    def published(self, version: int) -> None:
        self.source.published(version)

    def state(self) -> dict[str, Any]:
        return self.source.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.source.load_state(state)


class ReplayedSource(FollowsLoader):
    """Reads what `RecordedSource` wrote. `loader` only advances, so that its position is that of a run that
    samples."""

    def __init__(self, folder: Path, loader: PromptLoader):
        self.folder, self.loader = folder, loader

    def take(self, step: int) -> Trajectories:
        """The trajectories of that step. EnvironmentFault when its file cannot be read."""
        self.loader.next_batch()
        stored, facts = read_dump(dump_file(self.folder, step))
        batch = RemoteBatch.from_local(stored)
        scored = batch.select(facts["scores"], [], [])
        scored.meta_info |= {WHY_FAILED: facts[WHY_FAILED], FUNCTION_MEANS: facts.get(FUNCTION_MEANS) or {}}
        rows = batch.select([name for name in batch.columns if name not in facts["scores"]], None, [])
        return Trajectories(rows, CompletedFuture(scored), replayed=True)

    def published(self, version: int) -> None:
        """Does nothing: recorded trajectories need no weights."""


def dump_file(folder: Path, step: int) -> Path:
    """Where the trajectories of a step are."""
    return folder / f"step_{step}.safetensors"


def read_dump(file: Path) -> tuple[DataProto, Mapping[str, Any]]:
    """Trajectories with their scores, and facts. EnvironmentFault when the file is damaged or holds something
    else."""
    text = f"{file} cannot be read as trajectories"
    try:
        rows, facts = read_batch(file)
    except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise EnvironmentFault(f"{text}: {error or type(error).__name__}") from error
    lacking = [name for name in COLUMNS if name not in rows.keys()]
    lacking += [name for name in FACTS if name not in facts]
    if lacking:
        raise EnvironmentFault(f"{text}: it has no {', '.join(lacking)}")
    return rows, facts


def require_dumps(debug: DebugConfig, plan: BatchPlan, *, first: int) -> None:
    """Raises ConfigError when a step from `first` to the last has no dump, or the first file is not a dump.
    Group sizes need not be those of the configuration."""
    if debug.load_rollouts is None or first > plan.total_steps:
        return
    folder = expanded(debug.load_rollouts)
    other = f"{LOAD}=<a folder that trainer.debug.save_rollouts wrote>"
    missing = [step for step in range(first, plan.total_steps + 1) if not dump_file(folder, step).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        rule = f"has no trajectories of step {missing[0]}{more}"
        remedy = f"trainer.total_training_steps={missing[0] - 1}" if missing[0] > first else other
        raise ConfigError.one(LOAD, debug.load_rollouts, rule, remedy)
    try:
        read_dump(dump_file(folder, first))
    except EnvironmentFault as error:
        raise ConfigError.one(LOAD, debug.load_rollouts, str(error), other) from error
