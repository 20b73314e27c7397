"""A source of one's own: groups of random sizes, rows in random order, some of which a fault ended. The
default recipe learns from it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from jobs.command import LOCAL, STEPS_ALONE, read_steps
from jobs.learning import ACTOR, ENOUGH, Learnt, few_steps, gain, stop_once_learnt
from jobs.test_sources import changing_job, with_column

from hydraflow.compose.loading import load
from hydraflow.dispatch.shards import CompletedFuture
from hydraflow.protocol.fields import FINISH_REASONS
from hydraflow.schema import PPOConfig
from hydraflow.trainer.source import Trajectories

pytestmark = pytest.mark.slow

ROWS: list[int] = []
FAULTED: list[int] = []
"""Of each step, in order."""


def random_groups(taken: Trajectories, number: int) -> Trajectories:
    """What another source has sampled, less a random part of each group, in random order."""
    draw = np.random.default_rng(number)
    group = taken.rows.columns["group"].refs[0].data.numpy()  # type: ignore[attr-defined]
    share = draw.random(group.max() + 1)  # of each group's rows; of some none
    kept = draw.permutation(np.flatnonzero(draw.random(len(group)) < share[group]))
    faulted = draw.random(len(kept)) < 0.1
    ROWS.append(len(kept))
    FAULTED.append(int(faulted.sum()))
    rows, scored = taken.rows.select_idxs(kept), taken.scoring.get().select_idxs(kept)
    ends = torch.from_numpy(np.where(faulted, FINISH_REASONS.index("fault"), 0).astype(np.int8))
    return with_column(replace(taken, rows=rows, scoring=CompletedFuture(scored)), "finish_reason", ends)


RandomJob = changing_job(random_groups)


@pytest.mark.timeout(800)
def test_groups_of_any_size_in_any_order_train(
    tmp_path: Path, recipe_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_once_learnt(monkeypatch)
    overrides = [
        # About as many rows as the recipe's after the source has dropped its share.
        "data.train_batch_size=128",
        f"{ACTOR}.ppo_mini_batch_size=64",
        "trainer.test_freq=8",
        "trainer.total_training_steps=50",
    ]
    overrides = [*few_steps(tmp_path, recipe_cache), *overrides, *LOCAL]
    with suppress(Learnt):
        RandomJob(load("ppo", PPOConfig, overrides)).run()
    assert gain(tmp_path) > ENOUGH
    assert len(set(ROWS)) > 5 and max(FAULTED) > 0
    steps = read_steps(tmp_path)[1:]
    assert [row["rollout/faulted_rows"] for row in steps] == FAULTED
    tokens = [row["perf/total_num_tokens"] / row["perf/throughput"] for row in steps]
    assert len(tokens) >= 8 and all(0 < count < float("inf") for count in tokens)


def test_the_ranks_share_rows_that_do_not_divide(
    tmp_path: Path, recipe_cache: Path, ray_session: None
) -> None:
    """Two ranks of processes: any number of rows is filled up, faulted ones are left out, and PPO's critic
    gets the same rows."""
    overrides = [
        f"recipe.cache_dir={recipe_cache}",
        f"trainer.default_local_dir={tmp_path}",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
        *STEPS_ALONE,
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "data.val_max_samples=4",
    ]
    ROWS.clear()
    FAULTED.clear()
    RandomJob(load("ppo", PPOConfig, overrides)).run()
    assert len(ROWS) == 2
    assert [row["rollout/faulted_rows"] for row in read_steps(tmp_path)] == FAULTED and sum(FAULTED)
    for row in read_steps(tmp_path):
        assert row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0
