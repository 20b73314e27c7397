"""Every estimator and every loss really learns the default recipe: held-out accuracy rises by eight points
within twelve steps. All but `remax` need two: these runs show the first rise only.

In one process; with the recipe's own choices, grpo and vanilla, on two tensor-parallel ranks of
Megatron-Core, and with a critic on two of its pipeline stages. At an eighth of the recipe's learning rate,
without a warm-up, the first steps are the best ones; with rewards that say nothing accuracy falls: by one to
nine points after three steps, by twelve to twenty-two after twelve. With the recipe's choices
`test_own_source.py` trains in one process, and .ci/run in Ray on two data ranks. Whole runs are in the tables
of docs/advantages.md and docs/policy_losses.md (`scripts/bench/learn.py`)."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from jobs.command import LOCAL
from jobs.learning import ACTOR, ENOUGH, Learnt, few_steps, gain, stop_once_learnt

from hydraflow.algorithms.config import ESTIMATORS, POLICY_LOSSES
from hydraflow.compose.loading import load
from hydraflow.jobs.ppo import PPOJob
from hydraflow.options import Implementation
from hydraflow.schema import PPOConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


TENSOR_RANKS = ["recipe=arithmetic_megatron", "trainer.n_gpus_per_node=2", "trainer.threads_per_process=1"]
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
]
"""Three layers on two stages, of actor and critic."""
LOSS = f"{ACTOR}.policy_loss"
SUITABLE = {
    "adv_estimator=gdpo": ["algorithm.gdpo_reward_keys=[score]"],
    "loss_mode=gspo": [f"{ACTOR}.clip_ratio=0.01"],
    "loss_mode=geo_mean": [f"{ACTOR}.clip_ratio=0.4"],
    "loss_mode=cispo": [f"{ACTOR}.clip_ratio_low=1"],
    "loss_mode=dppo_kl": [f"{ACTOR}.clip_ratio=0.05"],
    "loss_mode=dro": [f"{LOSS}.dro_beta=0.1"],
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
    [*choices("algorithm.adv_estimator", ESTIMATORS), *choices(f"{LOSS}.loss_mode", POLICY_LOSSES)],
    ids=lambda given: given[0].rpartition(".")[2],
)
def test_it_learns(
    given: list[str], tmp_path: Path, recipe_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_once_learnt(monkeypatch)
    with suppress(Learnt):
        PPOJob(load("ppo", PPOConfig, [*given, *few_steps(tmp_path, recipe_cache)])).run()
    assert gain(tmp_path) > ENOUGH


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("given", [TENSOR_RANKS, STAGES], ids=["tensor-parallel", "stages-and-critic"])
def test_ranks_of_megatron_learn(
    given: list[str], tmp_path: Path, recipe_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended by SIGTERM, they save what they have learnt."""
    stop_once_learnt(monkeypatch, partial(signal.raise_signal, signal.SIGTERM))
    PPOJob(load("ppo", PPOConfig, [*given, *few_steps(tmp_path, recipe_cache)])).run()
    assert gain(tmp_path) > ENOUGH
    assert list(tmp_path.glob("global_step_*"))
