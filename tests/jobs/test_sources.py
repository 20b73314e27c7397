"""Sources of one's own, in one process: what they may deliver, what the run says of anything else, and that
their state comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.command import LOCAL, SMALL_RECIPE, STEPS_ALONE, read_steps

from hydraflow.compose.loading import load
from hydraflow.errors import GuardStop
from hydraflow.jobs.ppo import PPOJob
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.fields import FINISH_REASONS
from hydraflow.protocol.remote import RemoteBatch
from hydraflow.schema import PPOConfig
from hydraflow.trainer.source import Trajectories, TrajectorySource

pytestmark = pytest.mark.slow

Change = Callable[[Trajectories, int], Trajectories]


class Changing:
    """Another source, with a count of its own and something changed in what it takes."""

    def __init__(self, inner: TrajectorySource, change: Change):
        self.inner, self.change, self.takes = inner, change, 0

    def take(self, step: int) -> Trajectories:
        self.takes += 1
        return self.change(self.inner.take(step), self.takes)

    def give_back(self) -> None:
        self.inner.give_back()

    def published(self, version: int) -> None:
        self.inner.published(version)

    def state(self) -> dict[str, Any]:
        return {"inner": self.inner.state(), "takes": self.takes}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state(state["inner"])
        self.takes = state["takes"]


def changing_job(change: Change) -> type[PPOJob]:
    class Job(PPOJob):
        def source(self, *given: Any) -> TrajectorySource:
            return Changing(super().source(*given), change)

    return Job


def train(folder: Path, cache: Path, change: Change, *more: str) -> tuple[list[dict[str, float]], list[int]]:
    """The metrics of the steps, and the numbers of what was taken."""
    taken: list[int] = []

    def noted(given: Trajectories, number: int) -> Trajectories:
        taken.append(number)
        return change(given, number)

    overrides = [
        *SMALL_RECIPE,
        *LOCAL,
        f"recipe.cache_dir={cache}",
        f"trainer.default_local_dir={folder}",
        "trainer.total_training_steps=3",
        *STEPS_ALONE,
        "trainer.test_freq=-1",
        "data.val_max_samples=4",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=linear",
    ]
    changing_job(noted)(load("ppo", PPOConfig, [*overrides, *more])).run()
    return read_steps(folder), taken


def with_column(taken: Trajectories, name: str, column: torch.Tensor) -> Trajectories:
    rows = RemoteBatch(dict(taken.rows.columns), taken.rows.objects)
    rows.columns |= RemoteBatch.from_local(DataProto.from_dict({name: column})).columns
    return replace(taken, rows=rows)


def test_the_state_of_a_source_comes_back(tmp_path: Path, recipe_cache: Path) -> None:
    def unchanged(taken: Trajectories, number: int) -> Trajectories:
        return taken

    whole, taken = train(tmp_path / "whole", recipe_cache, unchanged, "trainer.save_freq=2")
    resumed = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/whole/global_step_2"]
    rest, taken_later = train(tmp_path / "rest", recipe_cache, unchanged, *resumed)
    assert (taken, taken_later) == ([1, 2, 3], [3])
    same = ("actor/grad_norm", "actor/pg_loss", "critic/score/mean", "actor/lr")
    assert [rest[-1][name] for name in same] == [whole[-1][name] for name in same]


def test_a_column_that_is_missing_is_named(tmp_path: Path, recipe_cache: Path) -> None:
    def without_replica(taken: Trajectories, number: int) -> Trajectories:
        names = [name for name in taken.rows.columns if name != "replica"]
        return replace(taken, rows=taken.rows.select(names, None, []))

    with pytest.raises(GuardStop, match=r"no column replica \(int32 \(B,\), the generation process"):
        train(tmp_path, recipe_cache, without_replica)


def test_old_samples_are_not_held_against_the_generation_engine(tmp_path: Path, recipe_cache: Path) -> None:
    """Rows of older weights come with other log-probabilities: they are recomputed, and the first fresh batch
    is the one that is compared."""

    def old_at_first(taken: Trajectories, number: int) -> Trajectories:
        if number > 1:
            return taken
        rows = taken.rows.columns["rollout_log_probs"].refs[0].data  # type: ignore[attr-defined]
        older = with_column(taken, "rollout_log_probs", rows - 1.0)
        return with_column(older, "versions", torch.full((len(taken.rows),), -1, dtype=torch.int32))

    rows, _ = train(tmp_path, recipe_cache, old_at_first)
    assert rows[0]["training/rollout_probs_diff_mean"] > 0.05
    assert abs(rows[0]["actor/ppo_kl"]) < 1e-4, "the ratio is of the trainer's own log-probabilities"
    assert len(rows) == 3


def test_a_step_without_a_usable_row_moves_the_learning_rate_on(tmp_path: Path, recipe_cache: Path) -> None:
    def faulted_at_first(taken: Trajectories, number: int) -> Trajectories:
        end = FINISH_REASONS.index("fault" if number == 1 else "stop")
        return with_column(taken, "finish_reason", torch.full((len(taken.rows),), end, dtype=torch.int8))

    rows, _ = train(tmp_path, recipe_cache, faulted_at_first)
    assert "actor/lr" not in rows[0] and rows[0]["rollout/faulted_rows"] == 32
    assert rows[1]["actor/lr"] / rows[2]["actor/lr"] == pytest.approx(2), "2/3 and 1/3 of the learning rate"
