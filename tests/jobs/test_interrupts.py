"""The main job is interrupted or loses a process: it ends soon, says why, leaves nothing behind, and can be started again."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
from jobs.command import SMALL_RECIPE, SMALL_STEPS, Started, has_lines, hydraflow, read_steps, start, wait_for

from hydraflow.trainer.checkpoint_store import CheckpointStore

pytestmark = pytest.mark.slow

ENDLESS = [*SMALL_RECIPE, *SMALL_STEPS, "trainer.total_training_steps=100000", "trainer.default_local_dir=out"]


def why_it_ended(home: Path) -> str:
    return json.loads((home / "out" / "summary.json").read_text())["why_it_ended"]


def interrupt(started: Started) -> None:
    os.killpg(started.process.pid, signal.SIGINT)
    assert started.ended(60) == 130, started.said()[-3000:]
    assert "Traceback" not in started.said()


def busy_training_processes(started: Started) -> list[psutil.Process]:
    """Those that run a method now; the process that scores has the reward processes as children."""
    family = psutil.Process(started.process.pid).children(recursive=True)
    at_work = [process for process in family if "ray::WorkerHost.invoke" in " ".join(process.cmdline())]
    return [process for process in at_work if not process.children()]


@pytest.fixture(scope="module")
def interrupted_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache whose first user was interrupted during the warm start."""
    home = tmp_path_factory.mktemp("warm")
    started = start("main_ppo", *ENDLESS, f"recipe.cache_dir={home}/cache", cwd=home)
    wait_for(lambda: has_lines(home / "out" / "warm_start" / "metrics.jsonl", 2), 180, "the first steps of the warm start")
    interrupt(started)
    assert not list((home / "cache").glob("*/model")), "the warm start was over before the interrupt"
    return home / "cache"


def test_ctrl_c_during_steps(tmp_path: Path, recipe_cache: Path) -> None:
    """A save is at work most of the time."""
    saves = ["trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2"]
    started = start("main_ppo", *ENDLESS, *saves, f"recipe.cache_dir={recipe_cache}", cwd=tmp_path)
    wait_for(lambda: has_lines(tmp_path / "out" / "metrics.jsonl", 4), 180, "the first steps")
    interrupt(started)
    assert why_it_ended(tmp_path) == "interrupted"
    store = CheckpointStore(tmp_path / "out")
    assert store.pointer() is not None and store.newest_whole(["actor"]) == (store.pointer(), {})


def test_a_killed_process_ends_a_run_on_a_cache_that_an_interrupted_one_left(tmp_path: Path, interrupted_cache: Path) -> None:
    started = start("main_ppo", *ENDLESS, f"recipe.cache_dir={interrupted_cache}", cwd=tmp_path)
    wait_for(lambda: has_lines(tmp_path / "out" / "metrics.jsonl", 4), 180, "the first steps")
    assert len(list(interrupted_cache.glob("*/model"))) == 1
    found: list[psutil.Process] = []
    wait_for(lambda: found.extend(busy_training_processes(started)) or found, 60, "a training process at work")
    begun = time.monotonic()
    found[0].kill()
    assert started.ended(30) == 4, started.said()[-3000:]
    assert time.monotonic() - begun < 30
    told = re.search(r"^(actor|rollout) rank [01] on node (\S+) failed in (\w+): the process died", started.said(), re.MULTILINE)
    assert told is not None and told[2] == socket.gethostname(), started.said()[-3000:]
    assert "Traceback" not in started.said()
    assert why_it_ended(tmp_path).startswith(told[0])


SLEEPY = """
import time
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info):
    while Path(__file__).with_name("asleep").exists():
        time.sleep(0.05)
    return sum(said == right for said, right in zip(solution_str, ground_truth)) / len(ground_truth)
"""


def test_sigterm_does_not_wait_for_rewards_that_sleep(tmp_path: Path, recipe_cache: Path) -> None:
    """The step that cannot be finished is given up, what was trained before it is saved, and the rest comes to the same numbers."""
    (tmp_path / "reward.py").write_text(SLEEPY)
    given = [*SMALL_RECIPE, *SMALL_STEPS, "trainer.total_training_steps=8", "trainer.save_freq=100", "reward.timeout=600"]
    given += [f"recipe.cache_dir={recipe_cache}", f"reward.custom_reward_function.path={tmp_path}/reward.py"]
    started = start("main_ppo", *given, "trainer.default_local_dir=out", cwd=tmp_path)
    wait_for(lambda: has_lines(tmp_path / "out" / "metrics.jsonl", 4), 180, "the first steps")
    (tmp_path / "asleep").touch()
    lines = 0
    while lines != (lines := len(read_steps(tmp_path / "out"))):
        time.sleep(3)
    begun = time.monotonic()
    started.process.send_signal(signal.SIGTERM)
    assert started.ended(60) == 0, started.said()[-3000:]
    assert time.monotonic() - begun < 30, "10 s on a machine with nothing else to do"
    assert f"step {lines} is given up: its rewards are late" in started.said() and "Traceback" not in started.said()
    assert CheckpointStore(tmp_path / "out").pointer() == lines - 1
    assert why_it_ended(tmp_path) == "SIGTERM received"

    (tmp_path / "asleep").unlink()
    assert hydraflow("main_ppo", *given, "trainer.default_local_dir=out", cwd=tmp_path).returncode == 0
    assert hydraflow("main_ppo", *given, "trainer.default_local_dir=whole", cwd=tmp_path).returncode == 0
    assert _values(tmp_path / "out") == _values(tmp_path / "whole")


def _values(folder: Path) -> list[dict[str, float]]:
    """Metrics that do not measure time."""
    timed = ("timing_s/", "perf/", "seconds")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in read_steps(folder)]
