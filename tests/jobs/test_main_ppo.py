"""The main job as a user starts it: it trains and leaves what it promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs.command import LOCAL, SMALL_RECIPE, completed, read_steps

from hydraflow.compose.loading import load
from hydraflow.jobs.ppo import PPOJob
from hydraflow.schema import PPOConfig


def test_it_leaves_what_it_promises(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["why_it_ended"] == "all steps done"
    assert summary["best_val_accuracy"] >= summary["first_val_accuracy"] >= 0
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").glob("events.*"))
    assert json.loads((run / "plan.json").read_text())["trajectories_per_step"] == 32
    assert "adv_estimator: grpo" in (run / "config.yaml").read_text()
    assert len(list((run / "samples").iterdir())) == 3, "samples of the validations at steps 0, 2 and 3"


def test_a_sample_shows_the_prompt_with_the_answer_to_it(run: Path) -> None:
    samples = [json.loads(line) for line in (run / "samples" / "step_000002.jsonl").read_text().splitlines()]
    assert len(samples) == 4
    for sample in samples:
        first, second = sample["input"].rstrip("=").split("+")  # such as 17+25=, whose ground truth is 042
        assert int(first) + int(second) == int(sample["ground_truth"])
        assert sample["score"] == float(sample["output"] == sample["ground_truth"])


def test_metrics_have_the_names_that_users_know(run: Path) -> None:
    rows = [row for row in read_steps(run) if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert "val-core/arithmetic/acc/mean@1" in rows[1] and "val-core/arithmetic/acc/mean@1" not in rows[0]
    for row in rows:
        known = {
            "actor/pg_loss",
            "actor/pg_clipfrac",
            "actor/ppo_kl",
            "actor/entropy",
            "actor/grad_norm",
            "actor/lr",
        }
        known |= {
            "critic/score/mean",
            "critic/rewards/mean",
            "critic/advantages/mean",
            "response_length/mean",
            "prompt_length/mean",
        }
        known |= {
            f"timing_s/{phase}"
            for phase in ("step", "gen", "reward", "adv", "update_actor", "update_weights")
        }
        known |= {
            "perf/throughput",
            "training/global_step",
            "training/rollout_probs_diff_mean",
            "perf/total_num_tokens",
            "perf/mfu/actor",
        }
        assert known <= set(row), known - set(row)
        assert row["training/rollout_probs_diff_max"] < 1e-4, (
            "the generation engine's probabilities are the trainer's"
        )
        assert row["perf/total_num_tokens"] == pytest.approx(
            32 * (row["prompt_length/mean"] + row["response_length/mean"])
        )


def test_idle_shares_are_of_the_runs_own_roles(run: Path) -> None:
    """Of none that a recipe had before."""
    for row in read_steps(run)[1:]:
        shares = {name: value for name, value in row.items() if name.startswith("perf/idle_share/")}
        assert {name.split("/")[-1] for name in shares} == {"actor", "rollout", "advantage", "reward"}
        assert all(0 <= share < 1 for share in shares.values()), shares
        busy = sum(1 - share for share in shares.values())
        assert row["perf/dispatch_share"] == pytest.approx(max(0.0, 1 - busy), abs=1e-9)


@pytest.mark.slow
def test_few_bytes_of_a_trajectory_pass_through_the_controller(
    tmp_path: Path, recipe_cache: Path, ray_session: None
) -> None:
    """Steps of the default recipe, with all its rows, on two ranks."""
    given = [f"recipe.cache_dir={recipe_cache}", f"trainer.default_local_dir={tmp_path}"]
    given += ["trainer.n_gpus_per_node=2", "trainer.total_training_steps=2", "trainer.val_before_train=false"]
    given += ["data.val_max_samples=4", "trainer.save_final_model=false", "trainer.logger=[file]"]
    PPOJob(load("ppo", PPOConfig, given)).run()
    found = [row["perf/controller_bytes_per_trajectory"] for row in read_steps(tmp_path)]
    assert len(found) == 2 and all(0 < number <= 120 for number in found), found


def test_the_trained_model_is_a_hugging_face_directory(run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run / "final_model" / "actor")
    tokenizer = AutoTokenizer.from_pretrained(run / "final_model" / "actor")
    assert model.config.num_hidden_layers == 3
    assert tokenizer.apply_chat_template([{"role": "user", "content": "17+25="}], tokenize=False) == "17+25="


def test_max_wall_time_ends_a_run_in_good_order(tmp_path: Path, recipe_cache: Path) -> None:
    completed(
        "main_ppo",
        *SMALL_RECIPE,
        *LOCAL,
        f"recipe.cache_dir={recipe_cache}",
        "trainer.max_wall_time=0.1s",
        "trainer.default_local_dir=out",
        cwd=tmp_path,
    )
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["steps"], summary["why_it_ended"]) == (1, "trainer.max_wall_time reached")
