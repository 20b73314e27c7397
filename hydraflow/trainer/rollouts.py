"""Where a step's trajectories come from: sampled and scored, or read from files that an earlier run wrote.

In: a batch of prompts. Out: trajectories with their row objects, and their scores. A step that reads a dump computes what the step that
wrote it computed, bit by bit: the file holds every column as it was.

    <folder>/step_12.safetensors     prompts, responses, response_mask, rollout_log_probs, lengths, group, scores, row objects

Left out on purpose: JSON for people to read, and what is done with the trajectories (`ppo.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import safetensors

from hydraflow.algorithms.groups import group_ids
from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.dispatch.group import RoleGroup
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.shards import Promised, Ready
from hydraflow.errors import ConfigError, EnvironmentFault, Problem
from hydraflow.generation.config import SamplingConfig
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.remote import RemoteBatch
from hydraflow.protocol.stored import read_batch, write_batch
from hydraflow.trainer.config import DebugConfig
from hydraflow.workers.reward import RewardWorker
from hydraflow.workers.rollout import RolloutWorker, SampleOrder

SCORING_OBJECTS = ["data_source", "reward_model", "extra_info"]
LOAD = "trainer.debug.load_rollouts"


class Rollouts(Protocol):
    """A source of trajectories."""

    def generate(self, prompts: DataProto, step: int) -> RemoteBatch:
        """`rollout.n` trajectories for every prompt, prompt-major, with the row objects."""
        ...

    def score(self, batch: RemoteBatch, step: int) -> Promised:
        """A batch of `token_level_scores`, `score` and `acc`; facts `failed` and `why_failed`."""
        ...


class Sampled:
    """Samples with the generation engine and scores with the reward function."""

    def __init__(self, sampling: SamplingConfig, samples_per_prompt: int, rollout: RoleGroup, reward: RoleGroup):
        self.sampling, self.n, self.rollout, self.reward = sampling, samples_per_prompt, rollout, reward

    def generate(self, prompts: DataProto, step: int) -> RemoteBatch:
        """The row objects stay with the controller, the columns with the workers."""
        order = SampleOrder(step, self.n, self.sampling.temperature, self.sampling.top_k, self.sampling.top_p)
        batch = sample(self.rollout, prompts, order)
        batch.columns |= RemoteBatch.from_local(_group_numbers(prompts, self.n)).columns
        return batch

    def score(self, batch: RemoteBatch, step: int) -> Promised:
        """The scores of rows are on their way."""
        return self.reward.call(RewardWorker.score, batch.select(["responses"], SCORING_OBJECTS, []))


class Recorded:
    """Another source, whose trajectories are also written to a folder. The controller reads all of them for that."""

    def __init__(self, source: Rollouts, folder: Path, runtime: Runtime):
        self.source, self.folder, self.runtime = source, folder, runtime

    def generate(self, prompts: DataProto, step: int) -> RemoteBatch:
        """What the source generates."""
        return self.source.generate(prompts, step)

    def score(self, batch: RemoteBatch, step: int) -> Promised:
        """Waits for the scores and writes the file. EnvironmentFault when it cannot."""
        scored: RemoteBatch = self.source.score(batch, step).get()
        names = [name for name in scored.columns if name != "text"]
        facts = {"step": step, "scores": names, "failed": scored.meta_info["failed"], "why_failed": scored.meta_info["why_failed"]}
        rows = RemoteBatch(dict(batch.columns), batch.objects).union(scored.select(names, [], []))
        try:
            write_batch(dump_file(self.folder, step), self.runtime.fetch(rows), facts)
        except OSError as error:
            raise EnvironmentFault(f"the trajectories of step {step} cannot be written to {self.folder}: {error.strerror}") from error
        return Ready(scored)


class Replayed:
    """Reads what `Recorded` wrote."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._scored: RemoteBatch | None = None

    def generate(self, prompts: DataProto, step: int) -> RemoteBatch:
        """The trajectories of that step; the prompts are those of the file."""
        rows, facts = read_batch(dump_file(self.folder, step))
        batch = RemoteBatch.from_local(rows)
        self._scored = batch.select(facts["scores"], [], [])
        self._scored.meta_info |= {name: facts[name] for name in ("failed", "why_failed")}
        return batch.select([name for name in batch.columns if name not in facts["scores"]], None, [])

    def score(self, batch: RemoteBatch, step: int) -> Promised:
        """The scores of the file."""
        assert self._scored is not None, "trajectories are generated before they are scored"
        return Ready(self._scored)


def dump_file(folder: Path, step: int) -> Path:
    """Where the trajectories of a step are."""
    return folder / f"step_{step}.safetensors"


def folder_of(path: str) -> Path:
    """A folder as the user named it."""
    return Path(path).expanduser()


def require_dumps(debug: DebugConfig, plan: BatchPlan, *, first: int) -> None:
    """Raises ConfigError when steps `first` to the last have no dump, or the first one has other sizes than the plan."""
    if debug.load_rollouts is None:
        return
    folder = folder_of(debug.load_rollouts)
    missing = [step for step in range(first, plan.total_steps + 1) if not dump_file(folder, step).is_file()]
    if missing:
        there = sorted(int(path.stem.split("_")[1]) for path in folder.glob("step_*.safetensors") if path.stem.split("_")[1].isdigit())
        rule = f"has no trajectories of step {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        run = next((number - 1 for number in range(first, plan.total_steps + 2) if number not in there), 0)
        remedy = f"trainer.total_training_steps={run}" if run >= first else f"{LOAD}=<a folder that trainer.debug.save_rollouts wrote>"
        raise ConfigError.one(LOAD, debug.load_rollouts, rule, remedy)
    try:
        rows, _ = read_batch(dump_file(folder, first))
    except (OSError, safetensors.SafetensorError, KeyError) as error:
        raise ConfigError.one(LOAD, dump_file(folder, first), f"cannot be read: {error}") from error
    trajectories, prompts = len(rows), len(np.unique(rows.get("group").numpy()))
    wanted = (plan.prompts_per_step, plan.samples_per_prompt)
    if (prompts, trajectories // prompts) != wanted:
        rule = f"holds {prompts} prompts with {trajectories // prompts} samples each; the plan has {wanted[0]} with {wanted[1]}"
        remedy = f"data.train_batch_size={prompts} actor_rollout_ref.rollout.n={trajectories // prompts}"
        raise ConfigError([Problem(LOAD, debug.load_rollouts, rule, remedy)])


def sample(rollout: RoleGroup, prompts: DataProto, order: SampleOrder) -> RemoteBatch:
    """Samples `order.n` responses per prompt; row objects are repeated here, columns stay with the workers."""
    inputs = prompts.select(batch_keys=["prompts"], non_tensor_batch_keys=["uid"])
    inputs.meta_info["sampling"] = order
    sampled = rollout.call(RolloutWorker.generate, inputs)
    sampled.objects |= {name: np.repeat(column, order.n) for name, column in prompts.non_tensor_batch.items()}
    return sampled


def _group_numbers(prompts: DataProto, n: int) -> DataProto:
    """`group` (S,) int64: trajectories of the same prompt have the same number."""
    return DataProto.from_dict(tensors={"group": group_ids(prompts.non_tensor_batch["uid"]).repeat_interleave(n)})
