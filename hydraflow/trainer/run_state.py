"""The state of a run besides its models: trainer.json of a checkpoint.

In: the controller's state after a step. Out: JSON, and the state read from it. It holds no random state,
because no worker has any: data order, sampling and mini-batches are drawn from (seed, epoch), (seed, epoch,
prompt, sample) and (seed, step). Reward functions are called row by row, so their processes have no state to
save either. Trajectories in flight between two steps, if any, are in their source's state.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hydraflow.errors import ConfigError
from hydraflow.trainer.checkpoint_store import RUN_STATE

REMEDY = "the version of hydraflow that wrote it (run.json of its run folder), or trainer.resume_mode=disable"


@dataclass(frozen=True)
class RunState:
    """The controller's state after `step` training steps."""

    step: int
    total_steps: int
    """Planned steps of the run when it was saved."""
    run_id: str
    """Identity in trackers: a resumed run continues the same curve."""
    source: dict[str, Any]
    """Position of the source of trajectories or conversations: `TrajectorySource.state()`."""
    data: dict[str, Any]
    """The data and their order: `PromptLoader.identity()`."""
    configuration: dict[str, Any]
    """Values of the keys that shape training (`identity.py`)."""
    configuration_hash: str
    kl: dict[str, float] = field(default_factory=dict)
    """State of the KL controller."""
    scores: dict[str, float] = field(default_factory=dict)
    """Moments of all scores so far (`algorithms/running.py`)."""
    entropy: dict[str, float] = field(default_factory=dict)
    """State of the controller of the entropy bonus; empty: its coefficient is constant."""
    skipped_in_a_row: dict[str, int] = field(default_factory=dict)
    """Optimizer steps of each trained role that were skipped since the last successful one
    (`workers/skipping.py`)."""
    origin: str | None = None
    """trainer.resume_from_path of the start that wrote this, or of the one that it resumed, if any."""

    @classmethod
    def read(cls, checkpoint: Path) -> RunState:
        """The state in a checkpoint. ConfigError when it cannot be read, or another version wrote it."""
        file = checkpoint / RUN_STATE
        try:
            found = json.loads(file.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError.one(str(file), None, f"cannot be read: {error}", REMEDY) from error
        if not isinstance(found, dict):
            raise ConfigError.one(str(file), None, "holds no JSON object", REMEDY)
        if unknown := sorted(found.keys() - {one.name for one in fields(cls)}):
            rule = f"has {', '.join(unknown)}, which this version of hydraflow does not know"
            raise ConfigError.one(str(file), None, rule, REMEDY)
        try:
            state = cls(**found)
        except TypeError as error:
            raise ConfigError.one(str(file), None, f"is of another version: {error}", REMEDY) from error
        if type(state.step) is not int or state.step < 0:
            raise ConfigError.one(str(file), None, f"has step={state.step!r}, which is no number", REMEDY)
        for name in ("source", "data", "configuration", "kl", "scores", "entropy", "skipped_in_a_row"):
            if not isinstance(getattr(state, name), dict):
                raise ConfigError.one(str(file), None, f"has no mapping in {name}", REMEDY)
        return state
