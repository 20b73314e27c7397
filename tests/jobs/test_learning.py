"""Estimators really learn the default recipe: thirty steps raise held-out accuracy by a wide margin.

In one process; with the recipe's own estimator, grpo, on two tensor-parallel ranks of Megatron-Core. With
grpo `test_own_source.py` trains in one process, and .ci/run in Ray on two data ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs.command import LOCAL, hydraflow

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


TENSOR_RANKS = ["recipe=arithmetic_megatron", "trainer.threads_per_process=1"]


@pytest.mark.parametrize(
    "given",
    [
        *([f"algorithm.adv_estimator={name}", *LOCAL] for name in ("rloo", "reinforce_plus_plus", "gae")),
        TENSOR_RANKS,
    ],
    ids=lambda given: given[0].split("=")[1],
)
def test_it_learns(given: list[str], tmp_path: Path, recipe_cache: Path) -> None:
    overrides = [
        *given,
        f"recipe.cache_dir={recipe_cache}",
        f"trainer.default_local_dir={tmp_path}",
    ]
    overrides += [
        "trainer.total_training_steps=30",
        "trainer.test_freq=-1",
        "trainer.logger=[file]",
        "trainer.save_final_model=false",
    ]
    done = hydraflow("main_ppo", *overrides, cwd=tmp_path, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 0.3 <= summary["first_val_accuracy"] <= 0.6, "the warm start leaves something to learn"
    assert summary["last_val_accuracy"] > summary["first_val_accuracy"] + 0.08
