"""The command line as a user meets it: each test starts a process."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ENTRY = Path(__file__).parent / "dummy_entry.py"
ROOT = ENTRY.parent.parent.parent


def call(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, str(ENTRY), *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def printed(result: subprocess.CompletedProcess[str]) -> list[dict]:
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_run_gets_its_configuration_and_leaves_no_files(tmp_path):
    [seen] = printed(call(tmp_path, "ppo", "+data.shuffle=false", "++trainer.seed=3", "data.val_batch_size=5"))
    assert seen["config"]["data"]["shuffle"] is False
    assert seen["config"]["trainer"]["seed"] == 3
    assert seen["config"]["recipe"]["name"] == "arithmetic"
    assert {"data.shuffle", "trainer.seed", "data.val_batch_size"} <= set(seen["given"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["data.train_bach_size=4"], "-> data.train_batch_size=4"),
        (["trainer.seed=abc"], "trainer.seed=abc: must be a whole number"),
        (["recipe=arithmetik"], "-> recipe=arithmetic or recipe=none"),
        (["algorithm.adv_estimator=grop"], "-> algorithm.adv_estimator=grpo"),
        (["--trainer.seed", "5"], "-> trainer.seed=5"),
        (["seed"], "seed: is not key=value"),
        (["--config-name", "missing"], "missing"),
        (["--config-dir", "missing"], "missing"),
        (["--cfg", "job", "-m"], "only one of these options"),
    ],
)
def test_a_mistake_is_named_without_a_stack_trace(tmp_path, arguments, expected):
    result = call(tmp_path, "ppo", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("1 problem found")
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


def test_several_mistakes_are_reported_at_once(tmp_path):
    result = call(tmp_path, "ppo", "data.train_bach_size=4", "trainer.seed=abc", "recipe=x", "--lr=3")
    assert result.returncode == 2
    assert result.stderr.startswith("4 problems found")


def test_the_stack_trace_is_there_for_who_asks(tmp_path):
    result = call(tmp_path, "ppo", "trainer.seed=abc", HYDRAFLOW_FULL_ERROR="1")
    assert result.returncode == 2
    assert "Traceback" in result.stderr


@pytest.mark.parametrize(("error", "code"), [("7", 7), ("worker", 4), ("interrupt", 130), ("ours", 1)])
def test_exit_codes(tmp_path, error, code):
    result = call(tmp_path, "ppo", HYDRAFLOW_TEST_ERROR=error)
    assert result.returncode == code
    assert ("Traceback" in result.stderr) == (error == "ours")


def test_a_users_file_is_checked_whole(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [ppo, _self_]\ndata: {train_bach_size: 3, shuffle: maybe}\nnew: 3\n")
    result = call(tmp_path, "ppo", "--config-dir", ".", "--config-name", "mine")
    assert result.returncode == 2
    assert all(key in result.stderr for key in ("3 problems", "data.train_bach_size=3", "data.shuffle=maybe", "new=3"))


def test_a_users_files_are_used(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [ppo, _self_]\nactor_rollout_ref: {model: {path: m}}\ndata: {train_files: t}\n")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "big.yaml").write_text("# @package _global_\ntrainer: {nnodes: 2}\n")
    [seen] = printed(call(tmp_path, "ppo", "--config-dir", ".", "--config-name", "mine", "+experiment=big"))
    assert (seen["config"]["trainer"]["nnodes"], seen["config"]["recipe"]["name"]) == (2, "none")
    assert "there are big" in call(tmp_path, "ppo", "--config-dir", ".", "+experiment=small").stderr


def test_a_sweep_runs_each_value(tmp_path):
    seen = printed(call(tmp_path, "ppo", "--multirun", "trainer.seed=1,2", "algorithm.gamma=0.5"))
    assert [one["config"]["trainer"]["seed"] for one in seen] == [1, 2]
    assert call(tmp_path, "ppo", "-m", "trainer.seed=1,x").returncode == 2


def test_an_interrupt_ends_the_sweep(tmp_path):
    result = call(tmp_path, "ppo", "-m", "trainer.seed=1,2", HYDRAFLOW_TEST_ERROR="interrupt")
    assert (result.returncode, result.stderr) == (130, "interrupted\n")


def test_the_configuration_can_be_shown(tmp_path):
    shown = call(tmp_path, "ppo", "--cfg", "job", "data.train_batch_size=96").stdout
    assert "train_batch_size: 96" in shown
    assert "max_prompt_length: 16" in shown  # the recipe's
    assert "searchpath" in call(tmp_path, "ppo", "--info", "searchpath").stdout.lower().replace(" ", "")


def test_help_lists_groups_and_keys(tmp_path):
    text = call(tmp_path, "ppo", "--help").stdout
    assert "recipe=arithmetic|none" in text
    assert "data.train_batch_size=1024   (a whole number)\n      Prompts in one training step" in text
    assert "Groups:" not in call(tmp_path, "sft", "--help").stdout


def test_neither_torch_nor_ray_is_imported_and_it_is_quick(tmp_path):
    code = (
        "import sys\n"
        "from hydraflow import batch_plan, batch_plan_sft, compose, schema\n"
        "config = compose.load('ppo', schema.PPOConfig)\n"
        "batch_plan.resolve_plan(config, processes=2, prompts=9000, critic=False, reference=False)\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'numpy') if name in sys.modules])\n"
    )
    start = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.stdout == "[]\n", result.stderr
    assert time.perf_counter() - start < 10  # about 0.6 s on an idle core; the machine may be busy
