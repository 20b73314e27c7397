"""The list of a step's phases: what is read was added before, and the README's table is the list."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from hydraflow.algorithms.config import OldFrom
from hydraflow.batch_plan.resolve import resolve_plan
from hydraflow.protocol.fields import FIELDS
from hydraflow.schema import PPOConfig
from hydraflow.trainer.phases import StepPhase, old_from, rollout_is_exact, step_phases

README = (Path(__file__).parents[2] / "README.md").read_text()


def config(estimator: str = "grpo", *, in_loss: bool = False, in_reward: bool = False) -> PPOConfig:
    made = PPOConfig()
    made.algorithm.adv_estimator = estimator
    made.actor_rollout_ref.actor.use_kl_loss, made.algorithm.use_kl_in_reward = in_loss, in_reward
    return made


@pytest.mark.parametrize("estimator", ["gae", "grpo", "remax", "gdpo", "optimal_token_baseline"])
@pytest.mark.parametrize("in_loss", [False, True])
@pytest.mark.parametrize("in_reward", [False, True])
def test_every_column_is_added_before_it_is_read(estimator: str, in_loss: bool, in_reward: bool) -> None:
    there: set[str] = set()
    for phase in step_phases(config(estimator, in_loss=in_loss, in_reward=in_reward)):
        assert set(phase.reads) <= there, phase
        assert set(phase.adds) <= set(FIELDS) and not set(phase.adds) & there, phase
        there |= set(phase.adds)
    assert ("values" in there) == (estimator == "gae")
    assert ("ref_log_prob" in there) == (in_loss or in_reward)
    for name, of in (
        ("reward_baselines", "remax"),
        ("reward_parts", "gdpo"),
        ("sum_pi_squared", "optimal_token_baseline"),
    ):
        assert (name in there) == (estimator == of)


def test_every_pass_of_a_model_knows_the_groups_that_stay_together() -> None:
    kept = config("gae", in_loss=True)
    kept.trainer.keep_groups = True
    passes = [phase for phase in step_phases(kept) if "response_mask" in phase.reads]
    assert {"log-probs", "reference", "values", "critic", "actor"} <= {phase.name for phase in passes}
    assert all("group" in phase.reads for phase in passes)
    kept.actor_rollout_ref.model.use_remove_padding = False
    assert all("group" not in phase.reads for phase in step_phases(kept) if phase.name == "log-probs")


def test_the_columns_that_a_kl_term_needs() -> None:
    def reads(name: str, **terms: bool) -> set[str]:
        [phase] = [one for one in step_phases(config(**terms)) if one.name == name]
        return set(phase.reads)

    assert "ref_log_prob" in reads("actor", in_loss=True)
    assert "ref_log_prob" not in reads("actor", in_reward=True)
    assert {"old_log_probs", "ref_log_prob"} <= reads("advantages", in_reward=True)
    assert not {"old_log_probs", "ref_log_prob"} & reads("advantages", in_loss=True)


@pytest.mark.parametrize(
    ("given", "source"),
    [
        ({}, OldFrom.FIRST_PASS),
        ({"rollout_is": "token"}, OldFrom.FIRST_PASS),
        ({"rollout_is": "token", "rollout_is_batch_normalize": True}, OldFrom.RECOMPUTE),
        ({"rollout_is_batch_normalize": True}, OldFrom.FIRST_PASS),
        ({"rollout_rs": "token_k1"}, OldFrom.RECOMPUTE),
        ({"bypass_mode": True, "rollout_rs": "token_k1"}, OldFrom.ROLLOUT),
        ({"use_kl_in_reward": True}, OldFrom.RECOMPUTE),
    ],
)
def test_old_log_probs_are_there_before_the_update_where_something_needs_them(
    given: dict[str, Any], source: OldFrom
) -> None:
    made = config()
    made.data.train_batch_size = made.actor_rollout_ref.actor.ppo_mini_batch_size = 8
    for name, value in given.items():
        owner = made.algorithm if name == "use_kl_in_reward" else made.algorithm.rollout_correction
        setattr(owner, name, value)
    assert old_from(made, resolve_plan(made, prompts=None), exact=False) == source
    [update] = [phase for phase in step_phases(made) if phase.name == "actor"]
    asked = bool({"rollout_is", "rollout_rs", "bypass_mode"} & given.keys())
    assert ("rollout_log_probs" in update.reads) == asked


def test_the_optimal_token_baseline_needs_a_pass_of_the_actor() -> None:
    made = config("optimal_token_baseline")
    assert old_from(made, resolve_plan(made, prompts=None), exact=True) == OldFrom.RECOMPUTE


def test_the_table_of_the_readme_is_this_list() -> None:
    section = README.partition("## Life of a batch")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    phases = step_phases(config("gae", in_loss=True))
    assert lines[1:] == [row_of(phase) for phase in phases]
    for worker in {phase.worker.partition(",")[0] for phase in phases} - {"data/"}:
        module = importlib.import_module(f"hydraflow.workers.{worker.removesuffix('Worker').lower()}")
        assert re.fullmatch(r"\w+Worker", worker) and hasattr(module, worker)


def row_of(phase: StepPhase) -> list[str]:
    marked = [", ".join(f"`{word}`" for word in words) for words in (phase.worker.split(", "), phase.adds)]
    return [phase.name, marked[0], marked[1] or "new weights"]


@pytest.mark.parametrize(
    ("rollout", "trained", "exact"),
    [
        ("fp32", "fp32", True),
        ("auto", "fp32", True),
        ("fp64", "fp64", True),
        ("bf16", "bf16", False),
        ("bf16", "fp32", False),
    ],
)
def test_log_probs_are_taken_from_the_engine_in_the_same_wide_type(
    rollout: str, trained: str, exact: bool
) -> None:
    sizes = {"fp64": 8, "fp32": 4, "bf16": 2}
    made = config()
    policy = made.actor_rollout_ref
    policy.rollout.dtype, policy.actor.fsdp_config.dtype, policy.actor.fsdp_config.model_dtype = (
        rollout,
        trained,
        trained,
    )
    assert rollout_is_exact(made, sizes.__getitem__) == exact
    policy.rollout.name = "vllm"
    assert not rollout_is_exact(made, sizes.__getitem__)
