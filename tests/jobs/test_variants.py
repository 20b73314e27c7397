"""Every estimator and every option of the losses trains for some steps through the whole system: on two real
worker processes where ranks could differ in what they do (a critic, micro-batches by tokens, adapters), else
in one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from jobs.command import LOCAL, SMALL_RECIPE, STEPS_ALONE, completed, read_steps

from hydraflow.compose.loading import load
from hydraflow.jobs.ppo import PPOJob
from hydraflow.protocol.ragged import lengths
from hydraflow.schema import PPOConfig
from hydraflow.trainer.recorded import dump_file, read_dump

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session")]

ACTOR = "actor_rollout_ref.actor"
DENSE_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(said == right for said, right in zip(solution_str, ground_truth)) / len(ground_truth)
"""
"""Share of right digits: hardly warmed up, the model is never right as a whole."""


def train(folder: Path, cache: Path, *overrides: str) -> list[dict[str, Any]]:
    """Trains in this process's Ray, or in a process without one, and returns the metrics of the steps."""
    given = [*SMALL_RECIPE, *STEPS_ALONE, "trainer.total_training_steps=2", "trainer.test_freq=-1"]
    given += [f"recipe.cache_dir={cache}", f"trainer.default_local_dir={folder}"]
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text(DENSE_REWARD)
    given += ["data.val_max_samples=4", f"reward.custom_reward_function.path={folder}/reward.py"]
    if LOCAL[0] in overrides:
        completed("main_ppo", *given, *overrides, cwd=folder)
    else:
        PPOJob(load("ppo", PPOConfig, [*given, "trainer.n_gpus_per_node=2", *overrides])).run()
    rows = [row for row in read_steps(folder) if row["step"] > 0]
    for row in rows:
        strange = {name: value for name, value in row.items() if not math.isfinite(float(value))}
        assert not strange
    return rows


def test_ppo_with_a_critic(tmp_path: Path, recipe_cache: Path) -> None:
    rows = train(
        tmp_path,
        recipe_cache,
        "algorithm.adv_estimator=gae",
        f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.use_dynamic_bsz=true",
        f"{ACTOR}.ppo_max_token_len_per_gpu=96",
        f"{ACTOR}.shuffle=true",
        "trainer.keep_groups=true",
        "trainer.critic_warmup=2",
        "critic.optim.lr=1e-3",
    )
    assert "actor/pg_loss" not in rows[0] and "critic/vf_loss" in rows[0], (
        "in the first step only the critic learns"
    )
    assert rows[1]["actor/grad_norm"] > 0 and rows[1]["critic/grad_norm"] > 0
    assert rows[0]["critic/values/mean"] == 0.0, "a new critic starts at 0"
    assert rows[1]["critic/values/mean"] != 0.0
    assert all(row["perf/mfu/critic_infer"] > 0 for row in rows)
    assert "perf/mfu/actor_infer" in rows[1], "of the comparison after the start, with the first update"


def test_rloo_with_a_kl_loss_and_an_entropy_bonus(tmp_path: Path, recipe_cache: Path) -> None:
    rows = train(
        tmp_path,
        recipe_cache,
        *LOCAL,
        "algorithm.adv_estimator=rloo",
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.entropy_coeff=0.01",
        f"{ACTOR}.kl_loss_type=k1",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum",
    )
    assert rows[0]["actor/kl_coef"] == pytest.approx(0.001)
    assert all(row["perf/mfu/ref_infer"] > 0 for row in rows)
    assert abs(rows[1]["actor/kl_loss"]) > abs(rows[0]["actor/kl_loss"]), (
        "the policy moves away from the reference"
    )


def test_the_coefficient_of_the_entropy_controller_is_that_of_the_loss(
    tmp_path: Path, recipe_cache: Path
) -> None:
    """Above the target there is no bonus, whatever the configured coefficient."""
    given = [f"{ACTOR}.entropy_coeff=2.0", f"{ACTOR}.adaptive_entropy.enabled=true"]
    given += [f"{ACTOR}.adaptive_entropy.target_entropy=0.0", f"{ACTOR}.adaptive_entropy.max_ent_coef=2.0"]
    controlled = train(tmp_path / "controlled", recipe_cache, *LOCAL, *given)
    without = train(tmp_path / "without", recipe_cache, *LOCAL)
    fixed = train(tmp_path / "fixed", recipe_cache, *LOCAL, given[0])
    assert [row["actor/entropy_coeff"] for row in controlled] == [0.0, 0.0]
    for row, same, other in zip(controlled, without, fixed, strict=True):
        assert row["actor/grad_norm"] == pytest.approx(same["actor/grad_norm"], rel=1e-4)
        assert row["actor/grad_norm"] != pytest.approx(other["actor/grad_norm"], rel=1e-3)


def test_reinforce_plus_plus_with_kl_in_the_reward(tmp_path: Path, recipe_cache: Path) -> None:
    rows = train(
        tmp_path,
        recipe_cache,
        *LOCAL,
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.use_kl_in_reward=true",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
    )
    assert rows[0]["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-5), (
        "at the first step the policy is the reference"
    )
    assert rows[1]["actor/reward_kl_penalty_coeff"] == 0.001


def test_an_adaptive_kl_controller_moves(tmp_path: Path, recipe_cache: Path) -> None:
    rows = train(
        tmp_path,
        recipe_cache,
        *LOCAL,
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100",
        "algorithm.kl_penalty=low_var_kl",
        f"{ACTOR}.use_dynamic_bsz=true",
        f"{ACTOR}.ppo_max_token_len_per_gpu=64",
        f"{ACTOR}.shuffle=true",
        f"{ACTOR}.fsdp_config.dtype=bf32",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
    )
    # KL is below its target, so the coefficient falls by a fifth of trajectories / horizon = 32 / 100.
    assert rows[1]["actor/reward_kl_penalty_coeff"] == pytest.approx(0.001 * (1 - 0.2 * 32 / 100))


def test_micro_batches_and_recomputation_change_nothing(tmp_path: Path, recipe_cache: Path) -> None:
    plain = train(tmp_path / "plain", recipe_cache, *LOCAL)
    cut = train(
        tmp_path / "cut",
        recipe_cache,
        *LOCAL,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    )
    for name in ("actor/grad_norm", "actor/pg_loss", "critic/score/mean", "actor/entropy"):
        assert cut[1][name] == pytest.approx(plain[1][name], rel=1e-3, abs=1e-5)


def test_adapters_with_themselves_switched_off_as_reference_on_one_rank_and_two(
    tmp_path: Path, recipe_cache: Path
) -> None:
    """In float64, where rounding is out of sight: the same samples, the same gradients. Without adapters:
    test_resume.py."""
    given = [
        "actor_rollout_ref.model.lora_rank=4",
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.loss_agg_mode=token-sum",
        f"{ACTOR}.ppo_mini_batch_size=8",
        f"{ACTOR}.fsdp_config.model_dtype=fp64",
        f"{ACTOR}.fsdp_config.dtype=fp64",
        f"{ACTOR}.fsdp_config.reduce_dtype=fp64",
        "actor_rollout_ref.rollout.dtype=fp64",
    ]
    rows = train(tmp_path / "two", recipe_cache, *given)
    assert rows[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-5), "new adapters change nothing"
    assert rows[1]["actor/kl_loss"] > 0
    assert rows[1]["training/rollout_probs_diff_max"] < 1e-4, "the generation engine got the merged weights"
    for one, two in zip(train(tmp_path / "one", recipe_cache, *given, *LOCAL), rows, strict=True):
        for name in (
            "actor/grad_norm",
            "actor/pg_loss",
            "actor/kl_loss",
            "critic/score/mean",
            "actor/entropy",
            "response_length/mean",
            "actor/ppo_kl",
        ):
            assert two[name] == pytest.approx(one[name], rel=1e-6, abs=1e-9), name


def test_two_copies_of_the_model_on_four_ranks(tmp_path: Path, recipe_cache: Path) -> None:
    """Hybrid sharding in float64: the numbers of one rank."""
    given = [f"{ACTOR}.fsdp_config.{name}=fp64" for name in ("model_dtype", "dtype", "reduce_dtype")]
    given.append("actor_rollout_ref.rollout.dtype=fp64")
    four = ["trainer.n_gpus_per_node=4", f"{ACTOR}.fsdp_config.fsdp_size=2"]
    rows = train(tmp_path / "four", recipe_cache, *given, *four)
    for one, found in zip(train(tmp_path / "one", recipe_cache, *given, *LOCAL), rows, strict=True):
        for name in ("actor/grad_norm", "actor/pg_loss", "critic/score/mean", "actor/entropy"):
            assert found[name] == pytest.approx(one[name], rel=1e-6, abs=1e-9), name


def test_two_ranks_that_share_the_tokens_of_rows(tmp_path: Path, recipe_cache: Path) -> None:
    """Actor, critic and reference with Ulysses, in float32 and in several micro-batches: the numbers of one
    rank. The reference is divided as the actor is."""
    size = "fsdp_config.ulysses_sequence_parallel_size=2"
    given = ["algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.entropy_coeff=0.01"]
    shared = [f"{ACTOR}.{size}", f"critic.{size}", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"]
    rows = train(tmp_path / "two", recipe_cache, *given, *shared)
    for one, two in zip(train(tmp_path / "one", recipe_cache, *given, *LOCAL), rows, strict=True):
        for name in (
            "actor/grad_norm",
            "actor/pg_loss",
            "actor/kl_loss",
            "actor/entropy",
            "critic/grad_norm",
            "critic/vf_loss",
            "critic/score/mean",
            "response_length/mean",
        ):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name


CORRECTION, COARSE = "algorithm.rollout_correction", ["actor_rollout_ref.rollout.dtype=bf16"]
"""Sampled in 16 bits and trained in 32, so that the two probabilities of a token differ."""


def test_weights_and_rejection(tmp_path: Path, recipe_cache: Path) -> None:
    rows = train(
        tmp_path,
        recipe_cache,
        *LOCAL,
        *COARSE,
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_is_threshold=0.5_5.0",
        f"{CORRECTION}.rollout_is_batch_normalize=true",
        f"{CORRECTION}.rollout_rs=[token_k1,seq_max_k3]",
        f"{CORRECTION}.rollout_rs_threshold=[1.004,1e-4]",
    )
    for row in rows:
        assert 0 < row["rollout_corr/rollout_rs_token_k1_masked_fraction"] < 1
        assert 0 < row["rollout_corr/rollout_rs_masked_fraction"] < 1
        assert row["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(1, abs=0.02)
        assert row["actor/grad_norm"] > 0 and row["rollout_corr/kl"] != 0


def test_tokens_are_chosen_over_all_ranks(tmp_path: Path, recipe_cache: Path) -> None:
    given = [f"{ACTOR}.policy_loss.loss_mode=clip_cov", f"{ACTOR}.policy_loss.clip_cov_ratio=0.05"]
    given += [f"{ACTOR}.policy_loss.clip_cov_lb=0.01", "trainer.keep_groups=true"]
    rows = train(tmp_path / "two", recipe_cache, *given)
    for one, two in zip(train(tmp_path / "one", recipe_cache, *given, *LOCAL), rows, strict=True):
        assert 0 < two["actor/cov_chosen"] <= 0.05
        for name in ("actor/cov_chosen", "actor/pg_loss", "actor/grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-7), name


@pytest.mark.parametrize("where", [[], LOCAL], ids=["two ranks", "one rank"])
def test_bypass_with_a_policy_gradient(tmp_path: Path, recipe_cache: Path, where: list[str]) -> None:
    """Two mini-batches in two epochs: what is rejected is new in each optimizer step."""
    rows = train(
        tmp_path,
        recipe_cache,
        *where,
        *COARSE,
        f"{ACTOR}.ppo_epochs=2",
        "trainer.keep_groups=true",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum",
        f"{CORRECTION}.bypass_mode=true",
        f"{CORRECTION}.loss_type=reinforce",
        f"{CORRECTION}.rollout_is=sequence",
        f"{CORRECTION}.rollout_rs=seq_mean_k1",
        f"{CORRECTION}.rollout_rs_threshold=1.01",
    )
    for row in rows:
        assert row["actor/grad_norm"] > 0 and "actor/pg_clipfrac" not in row
        assert 0 < row["rollout_corr/rollout_rs_masked_fraction"] < 1
        assert 0 < row["rollout_corr/rollout_is_std"] < 1


def test_bypass_with_a_clipped_loss(tmp_path: Path, recipe_cache: Path) -> None:
    rows = train(tmp_path, recipe_cache, *LOCAL, *COARSE, f"{CORRECTION}.bypass_mode=true")
    for row in rows:
        assert row["actor/ppo_kl"] != 0 and row["rollout_corr/k3_kl"] > 0
        assert row["actor/grad_norm"] > 0 and "rollout_corr/rollout_is_mean" not in row


def test_remax_scores_a_greedy_response_to_each_prompt(tmp_path: Path, recipe_cache: Path) -> None:
    """Two ranks sample and score it; a run that reads the trajectories from files has the same baselines."""
    files = tmp_path / "files"
    given = ["algorithm.adv_estimator=remax", f"{ACTOR}.optim.lr=1e-3"]
    rows = train(tmp_path / "two", recipe_cache, *given, f"trainer.debug.save_rollouts={files}")
    stored, _ = read_dump(dump_file(files, 1))
    baselines, tokens = stored.get("reward_baselines"), lengths(stored.get("responses"))
    expected = (tokens * (stored.get("score") - baselines)).sum() / tokens.sum()
    assert baselines.any() and rows[0]["critic/advantages/mean"] == pytest.approx(float(expected), abs=1e-6)
    for row, other in zip(
        rows, train(tmp_path / "one", recipe_cache, *given, f"trainer.debug.load_rollouts={files}", *LOCAL)
    ):
        assert row["critic/advantages/max"] == pytest.approx(other["critic/advantages/max"], rel=1e-5)
        assert row["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-3)


def test_gdpo_with_two_rewards(tmp_path: Path, recipe_cache: Path) -> None:
    tmp_path.joinpath("two.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 0.0, 'first': float(solution_str[:1] == '0'), 'length': len(solution_str)}\n"
    )
    rows = train(
        tmp_path,
        recipe_cache,
        "algorithm.adv_estimator=gdpo",
        "algorithm.gdpo_reward_keys=[first,length]",
        "algorithm.gdpo_reward_weights=[1.0,0.5]",
        *LOCAL,
        f"reward.custom_reward_function.path={tmp_path}/two.py",
    )
    for row in rows:
        assert row["gdpo/length/max"] > row["gdpo/first/max"] > 0 and row["actor/grad_norm"] > 0
        assert row["critic/advantages/mean"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_a_baseline_for_each_token(tmp_path: Path, recipe_cache: Path, name: str) -> None:
    """The actor's own pass is made in every step, though the generation engine computes the same."""
    rows = train(tmp_path, recipe_cache, f"algorithm.adv_estimator={name}", *LOCAL)
    for row in rows:
        assert row["actor/grad_norm"] > 0 and row["timing_s/old_log_prob"] > 0
        assert row["training/rollout_probs_diff_max"] < 1e-3
