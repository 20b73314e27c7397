"""Training that samples with SGLang's stand-in, which sleeps beside the trainer: the trainer agrees with it
in every step, and nothing of it is left. Without it, a run ends before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from generation.stand_in import installed
from jobs.command import ONE_RANK, SMALL_RECIPE, assert_refused, completed, hydraflow, read_steps, wait_for
from jobs.test_placement import SMALL_BUCKETS

from hydraflow.generation.sglang_weights import SHARED_MEMORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECTION = "actor_rollout_ref.rollout"
GIVEN = [f"{SECTION}.name=sglang", f"{SECTION}.max_num_seqs=32", f"{SECTION}.temperature=0.7"]


def test_the_trainer_agrees_with_it(tmp_path: Path, recipe_cache: Path) -> None:
    left, run = set(SHARED_MEMORY.glob("hydraflow-sglang-*")), tmp_path / "run"
    given = [*GIVEN, *SMALL_RECIPE, *SMALL_BUCKETS, f"recipe.cache_dir={recipe_cache}"]
    steps = [*ONE_RANK, "trainer.total_training_steps=2", "trainer.val_before_train=false"]
    with installed(tmp_path) as stand_in:
        completed("main_ppo", *given, *steps, f"trainer.default_local_dir={run}", cwd=tmp_path)
        wait_for(lambda: not stand_in.processes(), 10, "the server's end")
    rows = read_steps(run)
    assert len(rows) == 2 and all(0 < row["training/rollout_probs_diff_max"] < 1e-5 for row in rows)
    wait_for(lambda: set(SHARED_MEMORY.glob("hydraflow-sglang-*")) == left, 10, "the removal of its folder")


def test_it_is_refused_where_it_is_not_installed(tmp_path: Path) -> None:
    done = hydraflow("main_ppo", *GIVEN, *SMALL_RECIPE, cwd=tmp_path)
    assert_refused(done, f"{SECTION}.name=sglang", "needs SGLang, which is not installed")
    assert "uv pip install 'sglang>=0.5.23'" in done.stderr
