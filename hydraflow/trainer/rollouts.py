"""The source of a step's trajectories: sampled and scored, or read from files that an earlier run wrote.

In: a batch of prompts. Out: trajectories and their scores. A step that reads a dump computes what the step
that wrote it computed, bit for bit: the file holds every column exactly.

    <folder>/step_12.safetensors     prompts, responses, response_mask, rollout_log_probs, lengths, group,
                                     scores, row objects

Left out on purpose: JSON for people to read, and what is done with the trajectories (`ppo.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors

from hydraflow.algorithms.groups import group_ids
from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.dispatch.group import RoleGroup
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.shards import CompletedFuture, Future
from hydraflow.errors import ConfigError, EnvironmentFault, Problem
from hydraflow.generation.config import SamplingConfig
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.remote import RemoteBatch
from hydraflow.protocol.stored import read_batch, write_batch
from hydraflow.trainer.config import DebugConfig
from hydraflow.workers.reward import WITH_TEXTS, RewardWorker
from hydraflow.workers.rollout import RolloutWorker, SamplingSpec

SCORING_OBJECTS = ["data_source", "reward_model", "extra_info"]
TEXTS = ("text", "prompt_text")
"""Columns of scores for people to read; not in a file of trajectories."""
DUMPED = ("prompts", "responses", "response_mask", "group", "score")
FACTS = ("scores", "failed", "why_failed")
"""Columns and facts that every file of trajectories has."""
LOAD = "trainer.debug.load_rollouts"


class Rollouts(Protocol):
    """A source of trajectories. Samples are passed on as futures: the reward worker waits for them, not the
    controller."""

    def sampling(self, prompts: DataProto, step: int) -> Future:
        """Starts sampling `rollout.n` trajectories for every prompt, prompt-major."""
        ...

    def score(self, prompts: DataProto, sampling: Future, step: int) -> Future:
        """A batch of `score` and `acc`, perhaps `text` and `prompt_text`; facts
        `failed` and `why_failed`."""
        ...

    def generated(self, prompts: DataProto, sampling: Future) -> RemoteBatch:
        """The trajectories, once they are there, with `group`."""
        ...


class SampledRollouts:
    """Samples with the generation engine and scores with the reward function; `with_texts`: the scores come
    with prompts and responses."""

    def __init__(
        self,
        config: SamplingConfig,
        samples_per_prompt: int,
        rollout: RoleGroup,
        reward: RoleGroup,
        *,
        with_texts: bool,
    ):
        self.config, self.n, self.with_texts = config, samples_per_prompt, with_texts
        self.rollout, self.reward = rollout, reward

    def sampling(self, prompts: DataProto, step: int) -> Future:
        """The row objects stay with the controller, the columns with the workers."""
        how = self.config
        spec = SamplingSpec(step, self.n, how.temperature, how.top_k, how.top_p)
        return sample(self.rollout, prompts, spec)

    def score(self, prompts: DataProto, sampling: Future, step: int) -> Future:
        """The reward process waits for the samples itself."""
        return score_samples(self.reward, prompts, sampling, self.n, with_texts=self.with_texts)

    def generated(self, prompts: DataProto, sampling: Future) -> RemoteBatch:
        """Waits for the samples and adds `group` (S,) int64, the same number for the samples of a prompt."""
        batch: RemoteBatch = sampling.get()
        groups = group_ids(prompts.non_tensor_batch["uid"]).repeat_interleave(self.n)
        batch.columns |= RemoteBatch.from_local(DataProto.from_dict({"group": groups})).columns
        return batch


class RecordedRollouts:
    """Wraps another source and writes its trajectories to a folder; the controller fetches all of them for
    that."""

    def __init__(self, source: Rollouts, folder: Path, runtime: Runtime):
        self.source, self.folder, self.runtime = source, folder, runtime

    def sampling(self, prompts: DataProto, step: int) -> Future:
        """Passes the call on to the source."""
        return self.source.sampling(prompts, step)

    def generated(self, prompts: DataProto, sampling: Future) -> RemoteBatch:
        """The source's trajectories."""
        return self.source.generated(prompts, sampling)

    def score(self, prompts: DataProto, sampling: Future, step: int) -> Future:
        """Waits for the scores and writes the file. EnvironmentFault when it cannot."""
        scored: RemoteBatch = self.source.score(prompts, sampling, step).get()
        batch = self.generated(prompts, sampling)
        names = [name for name in scored.columns if name not in TEXTS]
        facts = {
            "step": step,
            "scores": names,
            "failed": scored.meta_info["failed"],
            "why_failed": scored.meta_info["why_failed"],
        }
        objects = batch.objects or _repeated(
            prompts, list(prompts.non_tensor_batch), len(batch) // len(prompts)
        )
        rows = RemoteBatch(dict(batch.columns), objects).union(scored.select(names, [], []))
        try:
            write_batch(dump_file(self.folder, step), self.runtime.fetch(rows), facts)
        except OSError as error:
            raise EnvironmentFault(
                f"the trajectories of step {step} cannot be written to {self.folder}: {error.strerror}"
            ) from error
        return CompletedFuture(scored)


class ReplayedRollouts:
    """Reads what `RecordedRollouts` wrote."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._scored: RemoteBatch | None = None

    def sampling(self, prompts: DataProto, step: int) -> Future:
        """The trajectories of that step; the prompts are those of the file."""
        rows, facts = read_dump(dump_file(self.folder, step))
        batch = RemoteBatch.from_local(rows)
        self._scored = batch.select(facts["scores"], [], [])
        self._scored.meta_info |= {name: facts[name] for name in ("failed", "why_failed")}
        return CompletedFuture(
            batch.select([name for name in batch.columns if name not in facts["scores"]], None, [])
        )

    def score(self, prompts: DataProto, sampling: Future, step: int) -> Future:
        """The scores of the file."""
        assert self._scored is not None, "trajectories are sampled before they are scored"
        return CompletedFuture(self._scored)

    def generated(self, prompts: DataProto, sampling: Future) -> RemoteBatch:
        """The trajectories, with their row objects."""
        batch: RemoteBatch = sampling.get()
        return batch


def dump_file(folder: Path, step: int) -> Path:
    """Where the trajectories of a step are."""
    return folder / f"step_{step}.safetensors"


def read_dump(file: Path) -> tuple[DataProto, Mapping[str, Any]]:
    """Trajectories with their scores, and facts. EnvironmentFault when the file is damaged or of another
    kind."""
    try:
        rows, facts = read_batch(file)
    except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise EnvironmentFault(
            f"{file} cannot be read as trajectories: {error or type(error).__name__}"
        ) from error
    if lacking := [name for name in DUMPED if name not in rows.keys()] + [
        name for name in FACTS if name not in facts
    ]:
        raise EnvironmentFault(f"{file} cannot be read as trajectories: it has no {', '.join(lacking)}")
    return rows, facts


def require_dumps(debug: DebugConfig, plan: BatchPlan, *, first: int) -> None:
    """Raises ConfigError when steps `first` to the last have no dump, or the first one has other sizes than
    the plan."""
    if debug.load_rollouts is None:
        return
    folder = Path(debug.load_rollouts).expanduser()
    missing = [step for step in range(first, plan.total_steps + 1) if not dump_file(folder, step).is_file()]
    if missing:
        there = sorted(
            int(path.stem.split("_")[1])
            for path in folder.glob("step_*.safetensors")
            if path.stem.split("_")[1].isdigit()
        )
        rule = f"has no trajectories of step {missing[0]}" + (
            f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        )
        run = next((number - 1 for number in range(first, plan.total_steps + 2) if number not in there), 0)
        remedy = (
            f"trainer.total_training_steps={run}"
            if run >= first
            else f"{LOAD}=<a folder that trainer.debug.save_rollouts wrote>"
        )
        raise ConfigError.one(LOAD, debug.load_rollouts, rule, remedy)
    try:
        rows, _ = read_dump(dump_file(folder, first))
    except EnvironmentFault as error:
        raise ConfigError.one(
            LOAD, debug.load_rollouts, str(error), f"{LOAD}=<a folder that trainer.debug.save_rollouts wrote>"
        ) from error
    trajectories, prompts = len(rows), len(np.unique(rows.get("group").numpy()))
    wanted = (plan.prompts_per_step, plan.samples_per_prompt)
    if (prompts, trajectories // prompts) != wanted:
        rule = (
            f"holds {prompts} prompts with {trajectories // prompts} samples each; the plan has {wanted[0]}"
            f" with {wanted[1]}"
        )
        remedy = f"data.train_batch_size={prompts} actor_rollout_ref.rollout.n={trajectories // prompts}"
        raise ConfigError([Problem(LOAD, debug.load_rollouts, rule, remedy)])


def sample(rollout: RoleGroup, prompts: DataProto, sampling_spec: SamplingSpec) -> Future:
    """Samples `sampling_spec.n` responses per prompt; columns stay with the workers, row objects here."""
    inputs = prompts.select(batch_keys=["prompts"], non_tensor_batch_keys=["uid"])
    inputs.meta_info["sampling"] = sampling_spec
    sampling: Future = rollout.call(RolloutWorker.generate, inputs)
    return sampling


def score_samples(
    reward: RoleGroup, prompts: DataProto, sampling: Future, n: int, *, with_texts: bool
) -> Future:
    """Scores `n` responses per prompt once they are sampled. `with_texts`: also returns prompts and responses
    as text."""
    objects = DataProto.from_dict(non_tensors=_repeated(prompts, SCORING_OBJECTS, n))
    objects.meta_info[WITH_TEXTS] = with_texts
    names = ["prompts", "responses"] if with_texts else ["responses"]
    scoring: Future = reward.call(RewardWorker.score, objects, sampling.columns(*names))
    return scoring


def _repeated(prompts: DataProto, names: Sequence[str], n: int) -> dict[str, np.ndarray]:
    """Row objects of `n` trajectories for every prompt."""
    return {name: np.repeat(prompts.non_tensor_batch[name], n) for name in names}
