"""Saves and restores a job's state besides its models: data order, controllers, skipped steps, identity.

In: a job's parts. Out: its `Checkpointer`, and a report of what was restored. Serves `ppo.py` and `sft.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from hydraflow.data.loader import PromptLoader, RowSource
from hydraflow.dispatch.group import RoleGroup
from hydraflow.errors import ConfigError
from hydraflow.jobs.run_start import RunStart
from hydraflow.schema import PPOConfig, SupervisedConfig
from hydraflow.system.paths import expanded
from hydraflow.tracking.trackers import Trackers
from hydraflow.trainer.checkpoint import Checkpointer, RoleCheckpoints
from hydraflow.trainer.checkpoint_store import CheckpointStore
from hydraflow.trainer.config import LoopConfig
from hydraflow.trainer.loop import Source
from hydraflow.trainer.resume import CheckpointRequirements, load_roles
from hydraflow.trainer.run_state import RunState
from hydraflow.workers.advantage import AdvantageWorker
from hydraflow.workers.config import CheckpointConfig
from hydraflow.workers.training import TrainedWorker


def ppo_roles(config: PPOConfig, *, critic: bool) -> dict[str, RoleCheckpoints]:
    """The trained roles of a PPO run, by the name of their folder in a checkpoint."""
    trainer, actor = config.trainer, config.actor_rollout_ref.actor
    kept = (trainer.max_actor_ckpt_to_keep, "trainer.max_actor_ckpt_to_keep")
    roles = {"actor": RoleCheckpoints("actor_rollout_ref.actor.checkpoint", actor.checkpoint, *kept)}
    if critic:
        kept = (trainer.max_critic_ckpt_to_keep, "trainer.max_critic_ckpt_to_keep")
        roles["critic"] = RoleCheckpoints("critic.checkpoint", config.critic.checkpoint, *kept)
    return roles


def sft_roles(config: SupervisedConfig) -> dict[str, RoleCheckpoints]:
    """The only role of a supervised run, by the name of its folder in a checkpoint."""
    kept = (config.trainer.max_ckpt_to_keep, "trainer.max_ckpt_to_keep")
    return {"model": RoleCheckpoints("checkpoint", config.checkpoint, *kept)}


def validated_roles() -> dict[str, RoleCheckpoints]:
    """What a run that only validates loads: the actor's weights. It saves nothing."""
    loaded = CheckpointConfig(load_contents=["model"])
    return {"actor": RoleCheckpoints("actor_rollout_ref.actor.checkpoint", loaded, None, "")}


def require_metric(keep_best: str | None, measured: Collection[str]) -> None:
    """Raises ConfigError if no validation measures `keep_best`, the metric that selects the best
    checkpoint."""
    if keep_best is None or keep_best in measured:
        return
    names = sorted(measured)
    known = f"there are {', '.join(names)}" if names else "it has no held-out rows (data.val_files)"
    rule = f"no validation of this run measures it; {known}"
    remedies = [f"trainer.keep_best={name}" for name in names] or ["data.val_files=<file>"]
    remedy = " or ".join([*remedies, "trainer.keep_best=null"])
    raise ConfigError.one("trainer.keep_best", keep_best, rule, remedy)


def training_loader(config: PPOConfig | SupervisedConfig, rows: RowSource, per_step: int) -> PromptLoader:
    """The loader of the training rows."""
    return PromptLoader(rows, per_step, shuffle=config.data.shuffle, seed=config.trainer.seed)


@dataclass(frozen=True)
class RunCheckpointing:
    """The parts of a run whose state checkpoints hold."""

    trainer: LoopConfig
    required: CheckpointRequirements
    start: RunStart
    groups: Mapping[str, RoleGroup]
    """Trained roles by the name of their folder in a checkpoint."""
    source: Source
    loader: PromptLoader
    """The training rows, from which the source takes."""
    advantage: RoleGroup | None = None
    """Holds the KL controller; None: the run has none."""
    undisturbed: Callable[[], AbstractContextManager[None]] = nullcontext
    """See `Checkpointer`."""

    def checkpointer(
        self, trackers: Trackers, controllers: Callable[[], dict[str, dict[str, float]]] = dict
    ) -> Checkpointer:
        """The run's checkpointer. ConfigError when the disk has too little room.

        `trackers` are flushed before each save: a checkpoint is never ahead of the metrics. `controllers`:
        returns their states, by field of `RunState`.
        """
        store = CheckpointStore(self.start.folder.path)
        describe = partial(self._describe, trackers, controllers)
        roles = self.required.roles
        checkpointer = Checkpointer(self.trainer, store, self.groups, roles, describe, self.undisturbed)
        checkpointer.require_space(self.required.total_steps, self.start.step)
        return checkpointer

    def restore(self) -> None:
        """Restores everything from the run's checkpoint, if it resumes from one, and prints what was
        restored."""
        found = self.start.found
        if found is None:
            return
        lines = load_roles(found, self.groups, self.required.roles)
        self.source.load_state(found.state.source)
        lines.append(f"data: {self.loader.place}")
        for name, in_a_row in found.state.skipped_in_a_row.items():
            self.groups[name].call(TrainedWorker.count_skipped_from, in_a_row)
        if self.advantage is not None:
            state = {"kl": found.state.kl, "scores": found.state.scores}
            self.advantage.call(AdvantageWorker.load_state_dict, state)
        if found.state.kl:
            lines.append(f"KL controller: coefficient {found.state.kl['value']:g}")
        if found.state.entropy:
            lines.append(f"entropy bonus: coefficient {found.state.entropy['value']:g}")
        lines.append(f"tracker: run {self.start.run_id}, steps up to {found.step} kept")
        print(f"continues after step {found.step} of {self.required.total_steps}, from {found.checkpoint}")
        for line in [*lines, *self.start.notes]:
            print(f"  {line}")

    def _describe(
        self, trackers: Trackers, controllers: Callable[[], dict[str, dict[str, float]]], step: int
    ) -> dict[str, Any]:
        """The content of the checkpoint's trainer.json."""
        trackers.flush()
        skipped = {name: group.call(TrainedWorker.skipped_in_a_row) for name, group in self.groups.items()}
        state = RunState(
            step=step,
            total_steps=self.required.total_steps,
            run_id=self.start.run_id,
            source=self.source.state(),
            data=self.loader.identity(),
            configuration=self.required.identity.values,
            configuration_hash=self.required.identity.hash,
            skipped_in_a_row=skipped,
            origin=self._origin(),
            **controllers(),
        )
        return asdict(state)

    def _origin(self) -> str | None:
        """See `RunState.origin`."""
        if self.trainer.resume_mode == "resume_path" and self.trainer.resume_from_path:
            return str(expanded(self.trainer.resume_from_path).resolve())
        return self.start.found.state.origin if self.start.found else None
