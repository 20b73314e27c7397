"""Runs on Megatron-Core: the numbers of FSDP2, roles with layouts of their own, and a run that goes on bit by
bit, or on another engine."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from jobs.command import assert_refused, hydraflow
from jobs.test_resume import FIVE, METRIC, given, stop_after, train, train_locally

from scripts import kill_matrix as matrix

pytestmark = pytest.mark.slow

ACTOR = "actor_rollout_ref.actor"
MEGATRON = [f"{ACTOR}.strategy=megatron", "critic.strategy=megatron"]
TENSOR = f"{ACTOR}.megatron.tensor_model_parallel_size=2"
STAGES = [
    "critic.megatron.pipeline_model_parallel_size=2",
    "+critic.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=1",
]
"""Three layers on two stages."""
SHORT = [
    "trainer.total_training_steps=3",
    "trainer.save_final_model=false",
    "trainer.save_freq=-1",
    "trainer.keep_best=null",
    f"{ACTOR}.optim.lr_warmup_steps=1",
]


def numbers(folder: Path) -> dict[int, dict[str, float]]:
    """What does not depend on the engine, by step."""
    names = ("actor/grad_norm", "actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/lr", METRIC)
    names += ("critic/grad_norm", "critic/vf_loss", "critic/score/mean")
    found = matrix.read_result(folder).metrics
    return {step: {name: values[name] for name in names if name in values} for step, values in found}


def assert_close(one: Path, other: Path) -> None:
    mine, theirs = numbers(one), numbers(other)
    assert mine and mine.keys() <= theirs.keys()
    for step, values in mine.items():
        assert values.keys() == theirs[step].keys()
        for name, value in values.items():
            assert math.isclose(value, theirs[step][name], rel_tol=2e-3, abs_tol=1e-5), (step, name)


@pytest.mark.usefixtures("ray_session")
def test_actor_and_critic_with_other_layouts_train_as_fsdp_does(tmp_path: Path, recipe_cache: Path) -> None:
    """Two tensor-parallel ranks for actor and reference, two stages for the critic, which therefore has a
    process of its own; against one process of FSDP2."""
    reference = f"{ACTOR}.use_kl_loss=true"
    train(tmp_path / "core", recipe_cache, "ppo", *SHORT, *MEGATRON, TENSOR, *STAGES, reference)
    train_locally(tmp_path / "fsdp", recipe_cache, "ppo", *SHORT, reference)
    assert_close(tmp_path / "core", tmp_path / "fsdp")


@pytest.mark.usefixtures("ray_session")
def test_a_run_goes_on_bit_by_bit_and_on_another_engine(
    tmp_path: Path, recipe_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "whole", recipe_cache, "megatron", FIVE)
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        train(tmp_path / "cut", recipe_cache, "megatron", FIVE)
    capsys.readouterr()
    train(tmp_path / "cut", recipe_cache, "megatron", FIVE)
    assert "continues after step 3 of 5" in capsys.readouterr().out
    wanted = matrix.read_result(tmp_path / "whole")
    assert len(wanted.metrics) == 6 and len(wanted.weights) == 35
    assert list(matrix.differences(matrix.read_result(tmp_path / "cut"), wanted)) == []

    checkpoint = f"trainer.resume_from_path={tmp_path / 'cut' / 'global_step_4'}"
    other = ["trainer.resume_mode=resume_path", checkpoint, f"{ACTOR}.strategy=fsdp2"]
    other.append("trainer.keep_best=null")
    reported = train_locally(tmp_path / "fsdp", recipe_cache, "megatron", *other, FIVE)
    assert "continues after step 4 of 5" in reported and "written by 2 ranks, read by 1" in reported
    assert sorted(numbers(tmp_path / "fsdp")) == [5]
    assert_close(tmp_path / "fsdp", tmp_path / "whole")


def test_padded_rows_train_as_packed_ones(tmp_path: Path, recipe_cache: Path) -> None:
    for name, packed in (("packed", "true"), ("padded", "false")):
        key = f"actor_rollout_ref.model.use_remove_padding={packed}"
        train_locally(tmp_path / name, recipe_cache, "grpo", *SHORT, MEGATRON[0], key)
    assert_close(tmp_path / "padded", tmp_path / "packed")


def test_what_it_does_not_have_is_refused_before_anything_starts(tmp_path: Path, recipe_cache: Path) -> None:
    sized = ["actor_rollout_ref.model.lora_rank=4"]
    done = hydraflow(
        "main_ppo", *given(tmp_path / "run", recipe_cache, "grpo"), MEGATRON[0], *sized, cwd=tmp_path
    )
    assert_refused(done, *sized)
