"""Faults in the middle of a run, as a user meets them: what ends, with which words and exit code, and what
goes on by itself."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from jobs.command import (
    LOCAL,
    ONE_RANK,
    SMALL_RECIPE,
    Started,
    completed,
    has_lines,
    hydraflow,
    read_steps,
    start,
    wait_for,
)
from jobs.dying import dying_worker

from hydraflow.compose.loading import load
from hydraflow.errors import WorkerError
from hydraflow.jobs.ppo import PPOJob
from hydraflow.schema import PPOConfig
from hydraflow.trainer import roles
from hydraflow.workers.skipping import read_skipped

ROLLOUT = "actor_rollout_ref.rollout"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def begin(home: Path, cache: Path, *overrides: str) -> Started:
    """A long run with four steps done."""
    given = [*SMALL_RECIPE, "trainer.total_training_steps=100000", "trainer.default_local_dir=out"]
    started = start("main_ppo", *given, f"recipe.cache_dir={cache}", *overrides, cwd=home)
    wait_for(
        lambda: started.process.poll() is not None or has_lines(home / "out" / "metrics.jsonl", 5),
        180,
        "the first steps",
    )
    assert started.process.poll() is None, started.said()[-3000:]
    return started


def family(started: Started, word: str) -> list[psutil.Process]:
    """Processes of the run whose command line holds that word."""
    return [
        process
        for process in psutil.Process(started.process.pid).children(recursive=True)
        if word in " ".join(process.cmdline())
    ]


def steps(home: Path) -> list[int]:
    return [int(line["step"]) for line in read_steps(home / "out")]


def test_a_run_goes_on_by_itself_as_often_as_it_may(tmp_path: Path, recipe_cache: Path) -> None:
    started = begin(
        tmp_path, recipe_cache, "trainer.save_freq=2", "trainer.max_restarts=1", "trainer.restart_backoff=0.5"
    )
    family(started, "ray::WorkerHost")[0].kill()
    wait_for(lambda: "RESTART 1 of 1 in 0.5 seconds" in started.said(), 60, "the restart")
    wait_for(lambda: "continues after step" in started.said(), 180, "the checkpoint")
    restored = int(re.findall(r"continues after step (\d+)", started.said())[0])
    assert restored >= 2 and restored % 2 == 0
    wait_for(lambda: has_lines(tmp_path / "out" / "metrics.jsonl", restored + 4), 120, "more steps")
    assert steps(tmp_path)[: restored + 3] == list(range(restored + 3)), (
        "no step is missing, none is there twice"
    )
    assert {
        line["step"] <= restored or line["training/restarts"] == 1.0 for line in read_steps(tmp_path / "out")
    } == {True}

    family(started, "ray::WorkerHost")[0].kill()
    assert started.ended(60) == 4, started.said()[-3000:]
    assert (
        "trainer.max_restarts=1 restarts are used up" in started.said() and "Traceback" not in started.said()
    )
    assert "default_local_dir: out\n" in (tmp_path / "out" / "config.yaml").read_text(), (
        "the configuration that was asked for"
    )


def test_rays_node_process_dies(tmp_path: Path, recipe_cache: Path) -> None:
    for attempt in ("first", "second"):
        (tmp_path / attempt).mkdir()
        started = begin(tmp_path / attempt, recipe_cache, *ONE_RANK)
        since = time.monotonic()
        family(started, "/raylet/raylet")[0].kill()
        code, seconds = started.ended(30), time.monotonic() - since
        if code != 1:  # Ray's client was first, as it may be on a busy machine (`dispatch/guard.py`)
            break
    assert code == 3 and seconds < 10, started.said()[-3000:]
    assert "Ray's node process (raylet) has ended: it was killed, or it failed" in started.said()
    assert "Start the same command again to resume from the last checkpoint." in started.said()


def test_rays_control_service_dies(tmp_path: Path, recipe_cache: Path) -> None:
    started = begin(tmp_path, recipe_cache, *ONE_RANK)
    since = time.monotonic()
    family(started, "gcs_server")[0].kill()
    assert started.ended(30) == 3, started.said()[-3000:]
    assert time.monotonic() - since < 30
    said = started.said()
    assert "Ray's control service (gcs_server) has ended: it was killed" in said and "Traceback" not in said


def test_a_process_hangs(tmp_path: Path, recipe_cache: Path) -> None:
    started = begin(tmp_path, recipe_cache, "trainer.rpc_timeout=6", *ONE_RANK)
    since = time.monotonic()
    family(started, "ray::WorkerHost")[0].send_signal(signal.SIGSTOP)
    assert started.ended(40) == 4, started.said()[-3000:]
    assert time.monotonic() - since > 5
    assert "no answer in 6 seconds" in started.said() and "Traceback" not in started.said()
    assert (
        "; stacks of all workers: " in started.said()
        and len(list((tmp_path / "out" / "stacks").iterdir())) == 1
    )


def test_a_rollout_process_dies_while_it_receives_weights(
    tmp_path: Path, recipe_cache: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it may not be replaced, the run ends; `test_placement.py` has the runs that go on."""
    monkeypatch.setattr(roles, "RolloutWorker", dying_worker({"receiving": 1}, tmp_path))
    given = [*SMALL_RECIPE, f"recipe.cache_dir={recipe_cache}"]
    given += ["trainer.fuse_roles=false", *ONE_RANK, "trainer.rpc_timeout=60"]
    given += [f"{ROLLOUT}.update_weights_bucket_megabytes=1", f"{ROLLOUT}.max_retries=0"]
    given += [f"trainer.default_local_dir={tmp_path}/out"]
    given += ["trainer.val_before_train=false", "trainer.logger=[file]"]
    with pytest.raises(WorkerError, match=r"^rollout rank 0 .* failed in read_weights: ") as caught:
        PPOJob(load("ppo", PPOConfig, given)).run()
    assert caught.value.exit_code == 4 and "no answer" not in str(caught.value)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["why_it_ended"].startswith("rollout rank 0 ")
    assert steps(tmp_path) == [], "the step whose weights were lost is not done"


def test_a_gradient_that_is_never_finite(tmp_path: Path, sft_keys: list[str]) -> None:
    """The first step throws the weights to 1e30, the second one is skipped. A stop in between forgets
    neither. Several ranks: `workers/test_skipping.py`."""
    many = [
        "optim.lr=1e30",
        "trainer.max_skipped_steps=2",
        "trainer.save_freq=2",
        "trainer.default_local_dir=out",
        "trainer.test_freq=-1",
    ]
    many += ["trainer.save_final_model=false", *LOCAL]
    completed("main_sft", *sft_keys, *many, "trainer.total_training_steps=2", cwd=tmp_path)
    done = hydraflow("main_sft", *sft_keys, *many, "trainer.total_training_steps=20", cwd=tmp_path)
    assert "continues after step 2 of 20" in done.stdout
    assert done.returncode == 5, (done.stdout + done.stderr)[-3000:]
    assert (
        "the gradient of the model was not finite in 2 optimizer steps in a row, the last one in step 3"
        in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["why_it_ended"].startswith(
        "the gradient of the model"
    )
    logged = [line.get("train/skipped_steps") for line in read_steps(tmp_path / "out") if line["step"]]
    assert logged == [0.0, 1.0]
    assert {line["train/oom_splits"] for line in read_steps(tmp_path / "out") if "train/loss" in line} == {
        0.0
    }
    files = sorted(os.listdir(tmp_path / "out" / "skipped"))
    assert files == [f"step_{step}_model_0_rank_0.safetensors" for step in (2, 3)]
    rows, facts = read_skipped(tmp_path / "out" / "skipped" / files[0])
    assert len(rows) == 4 and facts["step"] == 2
