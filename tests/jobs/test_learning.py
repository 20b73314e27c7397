"""Every estimator and every loss really learns the default recipe: thirty steps raise held-out accuracy.

In one process; with the recipe's own choices, grpo and vanilla, on two tensor-parallel ranks of
Megatron-Core, and with a critic on two of its pipeline stages, for which twenty steps are enough. With the
recipe's choices `test_own_source.py` trains in one process, and .ci/run in Ray on two data ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from jobs.command import LOCAL, hydraflow

from hydraflow.algorithms.config import ESTIMATORS, POLICY_LOSSES
from hydraflow.options import Implementation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


ACTOR = "actor_rollout_ref.actor"
TENSOR_RANKS = ["recipe=arithmetic_megatron", "trainer.threads_per_process=1"]
STAGES = [
    *(
        override
        for role in (ACTOR, "critic")
        for override in (
            f"{role}.megatron.pipeline_model_parallel_size=2",
            f"{role}.megatron.tensor_model_parallel_size=1",
            f"+{role}.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=1",
        )
    ),
    *TENSOR_RANKS,
    "algorithm.adv_estimator=gae",
    "trainer.total_training_steps=20",
]
"""Three layers on two stages, of actor and critic."""
LOSS = f"{ACTOR}.policy_loss"
SLOWER = f"{ACTOR}.optim.lr=1.5e-4"
"""The recipe's rate suits losses with a clip."""
SUITABLE = {
    "adv_estimator=gdpo": ["algorithm.gdpo_reward_keys=[score]"],
    "loss_mode=gspo": [f"{ACTOR}.clip_ratio=0.01"],
    "loss_mode=sapo": [SLOWER],
    "loss_mode=geo_mean": [f"{ACTOR}.clip_ratio=0.4"],
    "loss_mode=cispo": [f"{ACTOR}.clip_ratio_low=1", SLOWER],
    "loss_mode=gpg": [SLOWER],
    "loss_mode=dppo_kl": [f"{ACTOR}.clip_ratio=0.05"],
    "loss_mode=dro": [f"{LOSS}.dro_beta=0.1", SLOWER],
    "loss_mode=topr": [SLOWER],
    "loss_mode=clip_cov": [f"{LOSS}.clip_cov_ratio=0.002"],
    "loss_mode=kl_cov": [f"{LOSS}.kl_cov_ratio=0.002"],
}
"""What a choice needs besides, or learns this small recipe better with (docs/policy_losses.md)."""


def choices(key: str, table: Mapping[str, Implementation]) -> Iterator[list[str]]:
    """The overrides of each entry of a table, once where several names are the same code."""
    for name in {entry: name for name, entry in reversed(table.items())}.values():
        if name not in ("grpo", "vanilla"):
            choice = f"{key}={name}"
            yield [choice, *SUITABLE.get(choice.rpartition(".")[2], []), *LOCAL]


@pytest.mark.parametrize(
    "given",
    [
        *choices("algorithm.adv_estimator", ESTIMATORS),
        *choices(f"{LOSS}.loss_mode", POLICY_LOSSES),
        TENSOR_RANKS,
        STAGES,
    ],
    ids=lambda given: given[0].rpartition(".")[2],
)
def test_it_learns(given: list[str], tmp_path: Path, recipe_cache: Path) -> None:
    overrides = [
        "trainer.total_training_steps=30",
        *given,
        f"recipe.cache_dir={recipe_cache}",
        f"trainer.default_local_dir={tmp_path}",
    ]
    overrides += [
        "trainer.test_freq=-1",
        "trainer.logger=[file]",
        "trainer.save_final_model=false",
    ]
    done = hydraflow("main_ppo", *overrides, cwd=tmp_path, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 0.3 <= summary["first_val_accuracy"] <= 0.6, "the warm start leaves something to learn"
    assert summary["last_val_accuracy"] > summary["first_val_accuracy"] + 0.05
