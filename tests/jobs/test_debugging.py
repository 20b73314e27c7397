"""Parts of a run alone, rollouts that are replayed, and everything in one process: the same numbers, bit by
bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from dispatch import trace_format
from jobs.command import (
    ONE_RANK,
    SMALL_RECIPE,
    assert_refused,
    completed,
    hydraflow,
    python,
    read_numbers,
    read_steps,
)

from hydraflow.protocol.columns import first_difference
from hydraflow.protocol.stored import read_batch

pytestmark = pytest.mark.slow

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    # more different digits, more reward: there is something to learn from the first step
    return float(len(set(solution_str))) / 8
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("debugging")
    (home / "reward.py").write_text(REWARD)
    return home


def train(home: Path, cache: Path, name: str, *overrides: str, code: int = 0) -> Path:
    """A run of three steps in a folder of `home`, with one process for each role."""
    given = [*SMALL_RECIPE, f"recipe.cache_dir={cache}", *ONE_RANK, f"trainer.default_local_dir={name}"]
    given += [
        "trainer.total_training_steps=3",
        "reward.custom_reward_function.path=reward.py",
        "trainer.log_val_generations=2",
    ]
    done = hydraflow("main_ppo", *given, *overrides, cwd=home)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return home / name


@pytest.fixture(scope="module")
def with_ray(home: Path, recipe_cache: Path) -> Path:
    return train(home, recipe_cache, "with_ray", "trainer.debug.save_rollouts=dump", "trainer.test_freq=2")


def weights(run: Path) -> bytes:
    return (run / "final_model" / "actor" / "model.safetensors").read_bytes()


def assert_same_rows(one: Path, other: Path) -> None:
    (rows, facts), (others, other_facts) = read_batch(one), read_batch(other)
    assert facts == other_facts and sorted(dict(rows.items())) == sorted(dict(others.items()))
    assert {
        name: difference
        for name, column in rows.items()
        if (difference := first_difference(column, others.get(name)))
    } == {}


def test_the_reference_run_learns(with_ray: Path) -> None:
    """Else equal weights would say nothing."""
    lines = read_numbers(with_ray)
    assert all(line["actor/grad_norm"] > 0 for line in lines if line["step"])
    assert lines[1]["critic/score/max"] > lines[1]["critic/score/min"]


def test_without_ray_the_numbers_are_the_same(with_ray: Path, home: Path, recipe_cache: Path) -> None:
    local = ["trainer.debug.local=true", "trainer.debug.save_rollouts=dump_local", "trainer.test_freq=2"]
    run = train(home, recipe_cache, "local", *local)
    assert read_numbers(run) == read_numbers(with_ray)
    assert weights(run) == weights(with_ray)
    assert (run / "samples" / "step_000003.jsonl").read_text() == (
        with_ray / "samples" / "step_000003.jsonl"
    ).read_text()
    for step in (1, 2, 3):
        assert_same_rows(
            home / "dump_local" / f"step_{step}.safetensors", home / "dump" / f"step_{step}.safetensors"
        )


@pytest.mark.parametrize("where", ["trainer.debug.local=true", "trainer.debug.local=false"])
def test_training_on_a_dump_gives_the_same_weights(
    with_ray: Path, home: Path, recipe_cache: Path, where: str
) -> None:
    name = f"train_only_{where[-4:]}"
    run = train(
        home, recipe_cache, name, where, "trainer.debug.train_only=true", "trainer.debug.load_rollouts=dump"
    )
    assert weights(run) == weights(with_ray)
    trained = [
        {key: value for key, value in line.items() if not key.startswith("val-")}
        for line in read_numbers(with_ray)[1:]
    ]
    assert read_numbers(run)[1:] == trained, "no validation, and the same steps"


def test_replayed_rollouts_beside_validation(with_ray: Path, home: Path, recipe_cache: Path) -> None:
    run = train(
        home,
        recipe_cache,
        "replayed",
        "trainer.debug.local=true",
        "trainer.debug.load_rollouts=dump",
        "trainer.test_freq=2",
    )
    assert read_numbers(run) == read_numbers(with_ray) and weights(run) == weights(with_ray)


def test_sampling_alone(with_ray: Path, home: Path, recipe_cache: Path) -> None:
    only = [
        "trainer.debug.rollout_only=true",
        "trainer.debug.save_rollouts=dump_only",
        "trainer.debug.local=true",
    ]
    only += ["trainer.rollout_data_dir=responses"]
    run = train(home, recipe_cache, "rollout_only", *only)
    assert_same_rows(home / "dump_only" / "step_1.safetensors", home / "dump" / "step_1.safetensors")
    assert not (run / "final_model").exists()
    first, reference = read_numbers(run)[1], read_numbers(with_ray)[1]
    assert first["critic/score/mean"] == pytest.approx(reference["critic/score/mean"])
    assert first["response_length/max"] == reference["response_length/max"]
    assert "actor/grad_norm" not in first
    reported = [json.loads(line) for line in (home / "responses" / "1.jsonl").read_text().splitlines()]
    assert (
        np.mean([row["score"] for row in reported]) == pytest.approx(first["critic/score/mean"])
        and len(reported) == 32
    )
    stale, _ = read_batch(home / "dump_only" / "step_3.safetensors")
    assert len(stale) == 32 and len(np.unique(stale.get("group").numpy())) == 8


def test_dumps_that_do_not_suffice_are_refused_before_anything_starts(
    with_ray: Path, home: Path, recipe_cache: Path
) -> None:
    given = [*SMALL_RECIPE, f"recipe.cache_dir={recipe_cache}", "trainer.debug.local=true"]
    given += ["trainer.debug.load_rollouts=dump", "trainer.debug.train_only=true"]
    done = hydraflow(
        "main_ppo", *given, "trainer.total_training_steps=5", "trainer.default_local_dir=longer", cwd=home
    )
    assert_refused(done, "has no trajectories of step 4 and 1 more", "trainer.total_training_steps=3")


TYPED = """
import os, runpy
os.dup2(os.open("typed", os.O_RDONLY), 0)
runpy.run_module("hydraflow.main_ppo", run_name="__main__")
"""
"""The command, at whose debugger a user types what is in a file."""


def test_a_breakpoint_in_a_reward_function_opens_pdb(
    home: Path, recipe_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)  # Ray in the process of the tests has set it
    stops = "    if not seen:\n        seen.append(1)\n        breakpoint()\n    return 0.0\n"
    (home / "stops.py").write_text(
        f"seen = []\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n{stops}"
    )
    given = [
        f"recipe.cache_dir={recipe_cache}",
        "trainer.debug.local=true",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
    ]
    given += ["reward.custom_reward_function.path=stops.py", "trainer.default_local_dir=stops"]
    (home / "typed.py").write_text(TYPED)
    (home / "typed").write_text("p 'source is ' + data_source\nup\nc\n")
    done = python("typed.py", *SMALL_RECIPE, *given, cwd=home)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "(Pdb) 'source is arithmetic'" in done.stdout
    assert json.loads((home / "stops" / "summary.json").read_text())["steps"] == 1


def test_an_exception_of_a_worker_comes_with_its_stack(home: Path, recipe_cache: Path) -> None:
    """What pdb's post-mortem needs: the exception itself, not a message of another process."""
    given = [
        f"recipe.cache_dir={recipe_cache}",
        "trainer.debug.local=true",
        "reward.custom_reward_function.path=reward.py",
    ]
    (home / "broken.py").write_text(
        "import runpy\nimport hydraflow.workers.actor as actor\n"
        "actor.maximum = None\nrunpy.run_module('hydraflow.main_ppo', run_name='__main__')\n"
    )
    folder = "trainer.default_local_dir=raises"
    done = python("broken.py", *SMALL_RECIPE, *given, folder, cwd=home)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    assert "TypeError: 'NoneType' object is not callable" in done.stderr and "in update" in done.stderr


def test_supervised_training_and_generation_in_one_process(
    tmp_path: Path, sft_keys: list[str], sft_run: Path, prompts: Path, answers: Path
) -> None:
    """Two ranks and one begin with the same loss but for rounding; the responses are the same."""
    here = [
        "trainer.debug.local=true",
        "trainer.threads_per_process=1",
        "trainer.default_local_dir=out",
        "ray_init.timeline_file=t.json",
    ]
    completed("main_sft", *sft_keys, "trainer.total_training_steps=60", *here, cwd=tmp_path)
    lines, reference = read_steps(tmp_path / "out"), read_steps(sft_run)
    assert lines[0]["train/loss"] == pytest.approx(reference[0]["train/loss"], rel=1e-5)
    assert lines[-1]["val/accuracy"] == reference[-1]["val/accuracy"] == 1.0
    trace = json.loads((tmp_path / "t.json").read_text())
    trace_format.check(trace)
    assert len([event for event in trace_format.spans(trace, "sft") if event["name"] == "update"]) == 60
    given = [
        f"model.path={sft_run / 'final_model'}",
        f"data.path={prompts}",
        "data.max_response_length=8",
        "rollout.temperature=0",
    ]
    written = ["output.path=local.parquet", "ray_init.timeline_file=local.json"]
    completed("main_generate", *given, *written, "trainer.debug.local=true", cwd=tmp_path)
    for timeline in (tmp_path / "local.json", answers.parent.parent / "t.json"):
        trace_format.check(json.loads(timeline.read_text()))
    local, ray = (pyarrow.parquet.read_table(file) for file in (tmp_path / "local.parquet", answers))
    assert local.equals(ray)
