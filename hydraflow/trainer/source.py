"""Sources of trajectories: each step takes whole groups, sampled and scored.

In: a loader of prompts, the generation engine, the reward function. Out: `Trajectories`. `Lockstep` samples
on request, with the newest weights; files of trajectories are another source (`recorded.py`). You can write
your own: any object with the methods of `TrajectorySource`. Left out on purpose: what is done with the
trajectories (`ppo.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
import torch

from hydraflow.data.loader import PromptLoader
from hydraflow.dispatch.group import RoleGroup
from hydraflow.dispatch.shards import CompletedFuture, Future, LateShard, Shard, split
from hydraflow.errors import GuardStop
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.fields import described
from hydraflow.protocol.remote import RemoteBatch
from hydraflow.rewards.failures import require_scored
from hydraflow.trainer.phases import SCORES, TRAJECTORY
from hydraflow.trainer.routing import Router
from hydraflow.trainer.turns import Turns
from hydraflow.workers.reward import PARTS, SCORED_WITH, WITH_TEXTS, RewardWorker
from hydraflow.workers.rollout import RolloutWorker, SamplingSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trajectories:
    """Whole groups: all samples of some prompts, one row each, in any order."""

    rows: RemoteBatch
    """Held by the workers: the columns of sampling (`protocol/fields.py`). Held by the controller: `group`,
    `sample` and the row objects of each row's prompt."""
    scoring: Future
    """`score`, `acc` and `failed` of the same rows; `text` and `prompt_text` if responses are dumped;
    optionally `why_failed` in meta_info. The trainer's passes do not wait for it."""
    replayed: bool = False
    """Whether another run sampled them, so that their versions do not refer to this run's weights."""


class TrajectorySource(Protocol):
    """Provides the trainer with trajectories: rows with the columns `phases.TRAJECTORY`."""

    def take(self, step: int) -> Trajectories:
        """The trajectories of training step `step`, which counts from 1."""

    def give_back(self) -> None:
        """Undoes the last `take`, whose step was abandoned: the next one returns the same trajectories, or
        others of the same prompts, and `state` is the previous one."""

    def published(self, version: int) -> None:
        """Called when the generation engine has the weights of that version."""

    def state(self) -> dict[str, Any]:
        """State for checkpoints, as plain values: enough to continue with the next trajectories."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken; called before the first `take` of a resumed run."""


def checked(taken: Trajectories, also: Sequence[str] = ()) -> Trajectories:
    """Validates a source's trajectories. Returns a copy whose columns the trainer may change. `also`:
    required columns besides `phases.TRAJECTORY`. GuardStop when columns or all rows are missing."""
    needed = (*TRAJECTORY, *also)
    if lacking := [name for name in needed if name not in taken.rows.columns]:
        what = f"the trajectories have no column {lacking[0]} ({described(lacking[0])})"
        raise GuardStop(f"{what}: a source must deliver {', '.join(needed)}")
    if not len(taken.rows):
        raise GuardStop("a source must deliver at least one row for each step")
    return replace(taken, rows=RemoteBatch(dict(taken.rows.columns), taken.rows.objects))


def scores_of(taken: Trajectories, names: Sequence[str] = SCORES) -> RemoteBatch:
    """Waits for the scores. `names`: required columns. GuardStop when one is missing."""
    scored: RemoteBatch = taken.scoring.get()
    if lacking := [name for name in names if name not in scored.columns]:
        raise GuardStop(f"the scores have no column {lacking[0]} ({described(lacking[0])})")
    return scored


def check_failures(
    failed: int,
    rows: int,
    first_cause: str | None,
    max_share: float,
    *,
    where: str,
    so: str,
    unscored: int | None = None,
) -> None:
    """Logs on how many rows the reward function failed, and the first error. GuardStop when the `unscored`
    ones, by default all, are more than the share `max_share` of the rows. `so`: the consequence, for the
    message. `first_cause` None: the scores are a reward model's, and some are not finite."""
    first_cause = first_cause or "a score of the reward model is not a finite number"
    unscored = failed if unscored is None else unscored
    require_scored(unscored, rows, first_cause, max_share, where=where, so=so)
    if failed:
        text = "%s: scoring failed on %d of %d rows, and %d have no score: %s"
        logger.warning(text, where, failed, rows, unscored, first_cause)


class Sampler:
    """Samples prompts with the generation engine and scores the responses with the reward function.

    `how`: sampling parameters of all prompts. Without `reward` there are no scores. `model`: calls the reward
    model, whose `score` replaces the function's; it is called once the rows are there or, if it shares
    devices with the generation engine, once its scores are needed. `with_texts`: scores include prompts and
    responses as text. `with_greedy`: scores include that of an extra greedy response to each prompt.
    `parts`: scores include the function's numbers of these names.
    """

    def __init__(
        self,
        rollout: RoleGroup,
        reward: RoleGroup | None,
        how: SamplingSpec,
        *,
        turns: Turns | None = None,
        model: Callable[[RemoteBatch], Future] | None = None,
        with_texts: bool = False,
        with_greedy: bool = False,
        parts: Sequence[str] = (),
    ):
        self.rollout, self.reward, self.how, self.with_texts = rollout, reward, how, with_texts
        self.model, self.with_greedy, self.parts = model, with_greedy, tuple(parts)
        self.turns = turns or Turns()
        self.router = Router.of(rollout)
        self.version = 0
        """Version of the weights to sample with."""

    def sample(self, prompts: DataProto, visit: int) -> Trajectories:
        """Waits for the samples, not for their scores. `visit`: the epoch; -1 for validation."""
        table = row_table(prompts, [self.how.n] * len(prompts))
        with self.turns("rollout"):
            sampling = self._generate(prompts, self.how, visit)
            greedy = self._generate(prompts, self.how.greedy(), visit) if self.with_greedy else None
            scoring = self._score(table, sampling, greedy)  # queued behind the samples
            if greedy is not None:
                greedy.get()  # the turn ends after the last response
            rows = table.union(sampling.get())
        if self.model is not None:
            late = "reward_model" in self.turns.beside("rollout")
            call_model = partial(self.model, rows.select(["prompts", "responses"], [], []))
            scoring = ModelScores(scoring, call_model, late=late)
        return Trajectories(rows, scoring)

    def _generate(self, prompts: DataProto, how: SamplingSpec, visit: int) -> Future:
        inputs = prompts.select(batch_keys=["prompts"], non_tensor_batch_keys=["uid"])
        inputs.meta_info |= {"sampling": how, "visit": visit, "version": self.version}
        if self.router is not None:
            return CompletedFuture(self.router.sample(inputs, how))
        return self.rollout.call(RolloutWorker.generate, inputs)

    def _score(self, table: RemoteBatch, sampling: Future, greedy: Future | None) -> Future:
        """The reward process waits for the samples itself."""
        if self.reward is None:
            return CompletedFuture(RemoteBatch())
        objects = table.select([] if greedy is None else ["group"], SCORED_WITH)
        objects.meta_info |= {WITH_TEXTS: self.with_texts, PARTS: self.parts}
        names = ["prompts", "responses"] if self.with_texts else ["responses"]
        beside = [] if greedy is None else [greedy.columns("responses")]
        return self.reward.call(RewardWorker.score, objects, sampling.columns(*names), *beside)


class ModelScores(Future):
    """The reward function's answer with its scores replaced by the reward model's. `late`: call the model
    when the scores are needed, not at once."""

    joins = False

    def __init__(self, function: Future, model: Callable[[], Future], *, late: bool):
        self.function, self.model = function, cache(model)
        if not late:
            self.model()

    def shards(self, parts: int, padding: bool) -> list[Shard] | list[LateShard]:
        return split(self.get(), parts, padding=padding)

    def get(self) -> RemoteBatch:
        """The scored batch, with the reward model's scores in place of the function's. Waits for both."""
        scored: RemoteBatch = self.function.get()
        columns = scored.columns | {"score": self.model().get().columns["score"]}
        return RemoteBatch(columns, scored.objects, scored.meta_info)


def row_table(prompts: DataProto, samples: Sequence[int]) -> RemoteBatch:
    """The controller's columns for `samples[i]` samples of each prompt i, prompt by prompt: `group` and
    `sample`, both (S,) int64, and the prompt's row objects.

    >>> prompts = DataProto.from_dict(non_tensors={"uid": np.array(["a", "b", "c"], dtype=object)})
    >>> table = row_table(prompts, [2, 0, 1])
    >>> table.objects["uid"].tolist(), [table.columns[name].refs[0].data.tolist() for name in table.columns]
    (['a', 'a', 'c'], [[0, 0, 2], [0, 1, 0]])
    """
    counts = np.asarray(samples, dtype=np.int64)
    group = np.repeat(np.arange(len(counts)), counts)
    sample = np.arange(len(group)) - np.repeat(counts.cumsum() - counts, counts)
    return RemoteBatch.from_local(
        DataProto.from_dict(
            tensors={"group": torch.from_numpy(group), "sample": torch.from_numpy(sample)},
            non_tensors={name: column[group] for name, column in prompts.non_tensor_batch.items()},
        )
    )


class FollowsLoader:
    """The methods of a `TrajectorySource` whose only state is its position in the data."""

    loader: PromptLoader

    def give_back(self) -> None:
        self.loader.give_back()

    def state(self) -> dict[str, Any]:
        return self.loader.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state(state)


class Lockstep(FollowsLoader):
    """Synchronous sampling: each step's prompts are sampled on request, with the newest weights. Nothing is
    in flight between steps.

    `visit`: part of the key of every random draw; None: the epoch, so that a prompt's samples do not depend
    on the step that asks for them.
    """

    def __init__(self, loader: PromptLoader, sampler: Sampler, *, visit: int | None = None):
        self.loader, self.sampler, self.visit = loader, sampler, visit

    def take(self, step: int) -> Trajectories:
        prompts = self.loader.next_batch()
        return self.sampler.sample(prompts, self.loader.epoch if self.visit is None else self.visit)

    def published(self, version: int) -> None:
        self.sampler.version = version
