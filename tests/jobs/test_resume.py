"""A run that was stopped or killed and started again leaves what a run without a stop leaves, bit by bit."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from jobs.command import LOCAL, ONE_RANK, completed, has_lines, hydraflow, read_steps, start, wait_for

from hydraflow.compose.loading import load
from hydraflow.jobs.ppo import PPOJob
from hydraflow.schema import PPOConfig
from hydraflow.tracking.file import FileTracker
from scripts import kill_matrix as matrix

pytestmark = pytest.mark.slow

SEVEN, FIVE = (f"trainer.total_training_steps={count}" for count in (7, 5))
METRIC = "val-core/arithmetic/acc/mean@1"


def given(folder: Path, cache: Path, method: str) -> list[str]:
    """Seven steps, two optimizer steps each, on two ranks."""
    folder.mkdir(exist_ok=True)
    (folder.parent / "reward.py").write_text(matrix.REWARD)
    return [
        *matrix.COMMON,
        *matrix.METHODS[method],
        SEVEN,
        f"recipe.cache_dir={cache}",
        f"trainer.default_local_dir={folder}",
        f"reward.custom_reward_function.path={folder.parent}/reward.py",
        f"trainer.keep_best={METRIC}",
    ]


def train(folder: Path, cache: Path, method: str, *overrides: str) -> None:
    """Trains in this process's Ray."""
    PPOJob(load("ppo", PPOConfig, [*given(folder, cache, method), *overrides])).run()


def train_locally(folder: Path, cache: Path, method: str, *overrides: str) -> str:
    """Trains in a process without Ray, on one rank; returns what was printed."""
    done = completed("main_ppo", *given(folder, cache, method), *overrides, *LOCAL, cwd=folder)
    return done.stdout


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM comes while that step is being logged."""
    whole: Callable = FileTracker.log

    def log(self: FileTracker, metrics: dict[str, float], at: int) -> None:
        whole(self, metrics, at)
        if at == step:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(FileTracker, "log", log)


@pytest.fixture(scope="module")
def whole(ray_session: None, tmp_path_factory: pytest.TempPathFactory, recipe_cache: Path) -> Path:
    """The folder of a run that nothing stopped, with a critic and an adaptive KL controller."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(folder, recipe_cache, "ppo")
    return folder


def test_three_steps_and_four_are_seven(
    tmp_path: Path,
    recipe_cache: Path,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    method = "ppo"
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        train(tmp_path / "cut", recipe_cache, method)
    cut = tmp_path / "cut"
    assert json.loads((cut / "requeue").read_text()) == {"step": 3, "why": "SIGTERM received"}
    assert json.loads((cut / "summary.json").read_text())["steps"] == 3 and not (cut / "final_model").exists()
    capsys.readouterr()

    train(cut, recipe_cache, method)
    reported = capsys.readouterr().out
    assert f"continues after step 3 of 7, from {cut}/global_step_3" in reported
    assert "actor: weights, optimizer, place in the schedule; written by 2 ranks, read by 2" in reported
    assert "data: 3 of 75 batches of epoch 1 are done" in reported
    assert "KL controller: coefficient 0.000" in reported, "it has moved from 0.001"
    assert "entropy bonus: coefficient 0.0003" in reported, "it has moved from 0 three times"
    required = matrix.read_result(whole)
    assert len({step for step, _ in required.metrics}) == 8 and len(required.weights) == 71
    assert list(matrix.differences(matrix.read_result(cut), required)) == []
    assert not (cut / "requeue").exists()
    assert sorted(path.name for path in cut.glob("global_step_*")) == ["global_step_6", "global_step_7"], (
        "two are kept"
    )
    found = {step: values[METRIC] for step, values in required.metrics if step and METRIC in values}
    assert sorted(found) == [3, 6, 7], "the validations of both"
    assert json.loads((cut / "best" / "best.json").read_text())["value"] == max(found.values())

    train(cut, recipe_cache, method)
    assert "all 7 steps are done; nothing was started" in capsys.readouterr().out

    look = [
        "trainer.val_only=true",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={cut}/global_step_6",
    ]
    train_locally(tmp_path / "look", recipe_cache, method, *look, "trainer.keep_best=null")
    ((step, values),) = matrix.read_result(tmp_path / "look").metrics
    assert (step, values[METRIC]) == (6, found[6]), "a checkpoint can be validated again"


STOPS = """
import signal
from pathlib import Path

SCORED = []

def compute_score(data_source, solution_str, ground_truth, extra_info):
    SCORED.append(solution_str)
    stop = Path(__file__).with_name("stop_at_row")
    if stop.exists() and len(SCORED) == int(stop.read_text()):
        signal.raise_signal(signal.SIGTERM)
    return sum(said == right for said, right in zip(solution_str, ground_truth)) / len(ground_truth)
"""
"""The reward of the matrix, which is scored in the training process here; a row of it brings SIGTERM."""


def test_grpo_in_one_process_goes_on_bit_by_bit(tmp_path: Path, recipe_cache: Path) -> None:
    """Without a critic and a KL controller: what GRPO keeps is all that there is to restore, and moments of
    the scores."""
    (tmp_path / "stops.py").write_text(STOPS)
    stops = [f"reward.custom_reward_function.path={tmp_path}/stops.py", FIVE]
    stops += [f"algorithm.norm_{of}_type=running" for of in ("mean", "std")]
    train_locally(tmp_path / "whole", recipe_cache, "grpo", *stops)
    validated, scored = 32, 8 * 4
    (tmp_path / "stop_at_row").write_text(str(validated + 2 * scored + 1))
    train_locally(tmp_path / "cut", recipe_cache, "grpo", *stops)
    assert json.loads((tmp_path / "cut" / "requeue").read_text())["step"] == 3
    (tmp_path / "stop_at_row").unlink()
    reported = train_locally(tmp_path / "cut", recipe_cache, "grpo", *stops)
    assert "continues after step 3 of 5" in reported and "KL controller" not in reported
    wanted = matrix.read_result(tmp_path / "whole")
    assert [step for step, _ in wanted.metrics] == list(range(6)) and len(wanted.weights) == 35
    assert all(values["actor/grad_norm"] > 0 for step, values in wanted.metrics if step)
    assert list(matrix.differences(matrix.read_result(tmp_path / "cut"), wanted)) == []


@pytest.mark.usefixtures("ray_session")
def test_another_number_of_processes_goes_on(
    tmp_path: Path, recipe_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in another sharding. In float64, where the order of sums hardly shows."""
    actor = "actor_rollout_ref.actor"
    double = [f"{actor}.fsdp_config.{name}=fp64" for name in ("model_dtype", "dtype", "reduce_dtype")]
    double += ["actor_rollout_ref.rollout.dtype=fp64", "trainer.save_final_model=false", FIVE]
    train_locally(tmp_path / "whole", recipe_cache, "grpo", *double)
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        train(tmp_path / "cut", recipe_cache, "grpo", *double)
    other = [f"{actor}.fsdp_config.wrap_policy.min_num_params=0", f"{actor}.ppo_micro_batch_size_per_gpu=2"]
    reported = train_locally(tmp_path / "cut", recipe_cache, "grpo", *double, *other)
    assert "written by 2 ranks, read by 1" in reported
    rows = zip(
        matrix.read_result(tmp_path / "cut").metrics,
        matrix.read_result(tmp_path / "whole").metrics,
        strict=True,
    )
    for (step, mine), (_, theirs) in rows:
        assert mine.keys() == theirs.keys()
        for name in mine.keys() & {
            "actor/grad_norm",
            "actor/pg_loss",
            "critic/score/mean",
            "actor/entropy",
            "actor/lr",
            METRIC,
        }:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-8), (step, name)


class ForkedRun(matrix.Run):
    """A command of the matrix with seven steps, as a fork of a process that has imported the libraries."""

    def launch(self, given: list[str]) -> Any:
        self.started = start("main_ppo", *given, SEVEN, cwd=self.home)
        return self.started.process

    def family(self) -> list[psutil.Process]:
        found = []
        for pid in self.started.processes():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found


@pytest.mark.timeout(900)  # three runs one after the other
def test_a_run_that_is_killed_twice_goes_on(tmp_path: Path, recipe_cache: Path, whole: Path) -> None:
    """A rank in the middle of a save, as the tenth of the matrix's moments has it; then the controller."""
    (save,) = (moment for moment in matrix.draw_moments(10, seed=1) if moment.number == 10)
    assert (save.target, save.method, save.steps) == ("middle of a save", "ppo", 2)
    later = matrix.Moment(0, "controller", "ppo", steps=6, delay=0.0, rank=0)
    restored = []
    for moment, code in ((save, 4), (later, -signal.SIGKILL), (None, 0)):
        run = ForkedRun(tmp_path, "ppo", recipe_cache)
        if moment is later:
            newest = run.folder / "latest_checkpointed_iteration.txt"
            matrix.wait_until(lambda newest=newest: int(newest.read_text()) >= 4, matrix.STARTS, "a save")
        if moment is not None:
            matrix.strike(run, moment)
        assert run.ending(matrix.STARTS) == (code, ""), run.said()
        restored += re.findall(r"continues after step (\d+)", run.log.read_text())
    assert len(restored) == 2 and int(restored[0]) in (2, 4) and int(restored[1]) >= 4
    assert list(matrix.differences(matrix.read_result(run.folder), matrix.read_result(whole))) == []


def test_a_supervised_run_goes_on_after_a_warning_signal(tmp_path: Path, sft_keys: list[str]) -> None:
    """Slurm sends it to every process of a step. In Ray up to there, without Ray before and after."""
    keys = [
        *sft_keys,
        "optim.lr_scheduler_type=linear",
        "optim.lr_warmup_steps=4",
        "trainer.keep_best=val/loss",
        "trainer.logger=[file]",
    ]
    keys += [
        "trainer.total_training_steps=80",
        "trainer.save_freq=30",
        "trainer.test_freq=30",
        "trainer.max_ckpt_to_keep=1",
    ]
    completed("main_sft", *keys, *LOCAL, "trainer.default_local_dir=whole", cwd=tmp_path)
    keys += [*ONE_RANK, "trainer.default_local_dir=out"]
    started = start("main_sft", *keys, cwd=tmp_path)
    wait_for(lambda: has_lines(tmp_path / "out" / "metrics.jsonl", 20), 180, "the first steps")
    everyone = started.processes()
    assert len(everyone) > 5 and started.process.pid in everyone, "workers and Ray's own processes"
    for process in everyone:
        os.kill(process, signal.SIGUSR1)
    assert started.ended(60) == 0, started.said()[-3000:]
    assert "SIGUSR1: saves after this step, then ends" in started.said()
    step = json.loads((tmp_path / "out" / "requeue").read_text())["step"]
    assert 0 < step < 80

    again = completed("main_sft", *keys, *LOCAL, cwd=tmp_path)
    assert (
        f"continues after step {step} of 80" in again.stdout
        and "model: weights, optimizer, place in the schedule" in again.stdout
    )
    rows = {name: read_steps(tmp_path / name) for name in ("whole", "out")}
    for mine, theirs in zip(rows["out"], rows["whole"], strict=True):
        for name in ("step", "train/loss", "train/grad_norm", "train/lr", "val/loss", "val/accuracy"):
            assert mine.get(name) == theirs.get(name), (mine["step"], name)
    weights = [
        (tmp_path / name / "final_model" / "model.safetensors").read_bytes() for name in ("whole", "out")
    ]
    assert weights[0] == weights[1]
    assert [path.name for path in (tmp_path / "out").glob("global_step_*")] == ["global_step_80"]
    best = json.loads((tmp_path / "out" / "best" / "best.json").read_text())
    assert best["value"] == min(row["val/loss"] for row in rows["whole"] if "val/loss" in row)

    done = hydraflow("main_sft", *keys, cwd=tmp_path)
    assert done.returncode == 0 and "all 80 steps are done; nothing was started" in done.stdout
    other = hydraflow("main_sft", *keys, "optim.lr=0.5", cwd=tmp_path)
    assert (
        other.returncode == 2 and "optim.lr=0.5: " in other.stderr and "was trained with 0.01" in other.stderr
    )
