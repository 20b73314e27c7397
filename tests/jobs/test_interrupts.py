"""The main job is interrupted or loses a process: it ends soon, says why, leaves nothing behind, and can be
started again."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from dispatch import trace_format
from jobs.command import (
    LOCAL,
    ONE_RANK,
    SMALL_RECIPE,
    Started,
    completed,
    has_lines,
    hydraflow,
    python,
    read_numbers,
    read_steps,
    start,
    wait_for,
)

from hydraflow.tracking.run_lock import RunLock
from hydraflow.trainer.checkpoint_store import CheckpointStore
from hydraflow.trainer.signals import REPEATED

pytestmark = pytest.mark.slow

ENDLESS = [*SMALL_RECIPE, "trainer.total_training_steps=100000", "trainer.default_local_dir=out"]


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


def interrupt_again_and_again(started: Started) -> None:
    """Twelve times in a second, as an impatient hand does: on the way to the process that ends the run, and
    into the end."""
    for _ in range(12):
        with suppress(ProcessLookupError):
            os.killpg(started.process.pid, signal.SIGINT)
        time.sleep(0.1)


def ray_starts(started: Started) -> bool:
    """Whether the first of Ray's own processes is there; the connection to it is not yet."""
    for pid in started.processes():
        with suppress(OSError):  # it has ended meanwhile
            if "gcs_server" in Path(f"/proc/{pid}/cmdline").read_text():
                return True
    return False


def imports(started: Started) -> bool:
    """Whether Python has come to our own code: torch is among the first libraries after that."""
    return "libtorch" in Path(f"/proc/{started.process.pid}/maps").read_text()


def trains(started: Started) -> bool:
    """Most of the time it is saving, too."""
    return has_lines(started.log.parent / "out" / "metrics.jsonl", 4)


@pytest.mark.parametrize("moment", [imports, ray_starts, trains])
def test_ctrl_c_again_and_again(
    tmp_path: Path, recipe_cache: Path, moment: Callable[[Started], bool]
) -> None:
    saves = ["trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2"]
    given, fresh = [*ENDLESS, *saves, f"recipe.cache_dir={recipe_cache}"], moment is imports
    started = start("main_ppo", *given, cwd=tmp_path, fresh=fresh)
    wait_for(lambda: moment(started), 180, moment.__name__)
    interrupt_again_and_again(started)
    assert started.process.wait(timeout=30) == 130, started.said()[-3000:]
    wait_for(lambda: not started.processes(), 10, "all processes to end")
    said = started.said()
    assert "Traceback" not in said and said.endswith("interrupted\n"), said[-3000:]
    if moment is trains:
        RunLock(tmp_path / "out").release()
        assert why_it_ended(tmp_path) == "interrupted"
        store = CheckpointStore(tmp_path / "out")
        assert store.pointer() is not None and store.newest_whole(["actor"]) == (store.pointer(), {})


def test_a_second_sigterm_does_not_wait_for_a_step_that_hangs(tmp_path: Path, recipe_cache: Path) -> None:
    """The first one only asks; a copy of it right after it changes nothing."""
    started = start(
        "main_ppo",
        *ENDLESS,
        "trainer.save_freq=2",
        *ONE_RANK,
        f"recipe.cache_dir={recipe_cache}",
        cwd=tmp_path,
    )
    wait_for(lambda: trains(started), 180, "the first steps")
    for process in psutil.Process(started.process.pid).children(recursive=True):
        if "ray::WorkerHost" in " ".join(process.cmdline()):
            process.send_signal(signal.SIGSTOP)
    for _ in range(2):
        started.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    time.sleep(REPEATED)
    assert started.process.poll() is None, "the step that hangs may still end"
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(timeout=30) == 143, started.said()[-3000:]
    wait_for(lambda: not started.processes(), 10, "all processes to end")
    assert "Traceback" not in started.said() and started.said().endswith("ended by a repeated SIGTERM\n")
    assert why_it_ended(tmp_path) == "SIGTERM received"
    assert json.loads((tmp_path / "out" / "requeue").read_text())["why"] == "SIGTERM received"
    RunLock(tmp_path / "out").release()


@pytest.fixture(scope="module")
def interrupted_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache whose first user was interrupted during the warm start."""
    home = tmp_path_factory.mktemp("warm")
    started = start("main_ppo", *ENDLESS, f"recipe.cache_dir={home}/cache", cwd=home)
    wait_for(
        lambda: has_lines(home / "out" / "warm_start" / "metrics.jsonl", 2),
        180,
        "the first steps of the warm start",
    )
    interrupt(started)
    assert not list((home / "cache").glob("*/model")), "the warm start was over before the interrupt"
    return home / "cache"


def test_a_killed_process_ends_a_run_on_a_cache_that_an_interrupted_one_left(
    tmp_path: Path, interrupted_cache: Path
) -> None:
    given = [*ENDLESS, f"recipe.cache_dir={interrupted_cache}", "ray_init.timeline_file=t.json"]
    started = start("main_ppo", *given, cwd=tmp_path)
    wait_for(lambda: has_lines(tmp_path / "out" / "metrics.jsonl", 4), 180, "the first steps")
    assert len(list(interrupted_cache.glob("*/model"))) == 1
    found: list[psutil.Process] = []
    wait_for(
        lambda: found.extend(busy_training_processes(started)) or found, 60, "a running training process"
    )
    since = time.monotonic()
    found[0].kill()
    assert started.ended(30) == 4, started.said()[-3000:]
    assert time.monotonic() - since < 30
    reported = re.search(
        r"^(actor|rollout|advantage) rank [01] on node (\S+) failed in (\w+): the process died",
        started.said(),
        re.MULTILINE,
    )
    assert reported is not None and reported[2] == socket.gethostname(), started.said()[-3000:]
    assert "Traceback" not in started.said()
    assert why_it_ended(tmp_path).startswith(reported[0])

    trace = json.loads((tmp_path / "t.json").read_text())
    trace_format.check(trace)
    assert {"step 1", "step 3"} <= {event["name"] for event in trace_format.spans(trace, "controller")}
    last = hydraflow("logs", "out", "--level", "error", cwd=tmp_path).stdout
    assert re.search(r"ERROR controller-0 .* rank \d on node \S+ failed in \w+: the process died", last), last


SLEEPY = """
import time
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info):
    while Path(__file__).with_name("asleep").exists():
        time.sleep(0.05)
    return sum(said == right for said, right in zip(solution_str, ground_truth)) / len(ground_truth)
"""


@pytest.mark.timeout(600)  # three runs, one after the other
def test_sigterm_does_not_wait_for_rewards_that_sleep(tmp_path: Path, recipe_cache: Path) -> None:
    """The step that cannot be finished is given up, what was trained before it is saved, and the rest comes
    to the same numbers."""
    (tmp_path / "reward.py").write_text(SLEEPY)
    given = [
        *SMALL_RECIPE,
        "trainer.total_training_steps=8",
        "trainer.save_freq=100",
        "reward.timeout=600",
    ]
    given += [f"recipe.cache_dir={recipe_cache}", f"reward.custom_reward_function.path={tmp_path}/reward.py"]
    started = start("main_ppo", *given, "trainer.default_local_dir=out", *ONE_RANK, cwd=tmp_path)
    wait_for(lambda: has_lines(tmp_path / "out" / "metrics.jsonl", 4), 180, "the first steps")
    (tmp_path / "asleep").touch()
    lines = 0
    while lines != (lines := len(read_steps(tmp_path / "out"))):
        time.sleep(3)
    since = time.monotonic()
    started.process.send_signal(signal.SIGTERM)
    assert started.ended(60) == 0, started.said()[-3000:]
    assert time.monotonic() - since < 30, "10 s on a machine with nothing else to do"
    assert (
        f"step {lines} is abandoned: its rewards are not ready" in started.said()
        and "Traceback" not in started.said()
    )
    assert CheckpointStore(tmp_path / "out").pointer() == lines - 1
    assert why_it_ended(tmp_path) == "SIGTERM received"

    (tmp_path / "asleep").unlink()
    for folder in ("out", "whole"):
        completed("main_ppo", *given, *LOCAL, f"trainer.default_local_dir={folder}", cwd=tmp_path)
    assert read_numbers(tmp_path / "out") == read_numbers(tmp_path / "whole")


NO_TIME = """
import os, runpy, signal
from hydraflow.trainer.clock import GracePeriodOver
from hydraflow.trainer.validation import Validator

def abandoned(self, step, version):
    os.kill(os.getpid(), signal.SIGTERM)
    raise GracePeriodOver

Validator.run = abandoned
runpy.run_module("hydraflow.main_ppo", run_name="__main__")
"""
"""The command, whose validation is interrupted and has no time left."""


def test_the_last_validation_is_made_up_for(tmp_path: Path, recipe_cache: Path) -> None:
    """Its run is not complete before it."""
    (tmp_path / "no_time.py").write_text(NO_TIME)
    given = [*SMALL_RECIPE, *LOCAL, "trainer.total_training_steps=2", "trainer.test_freq=-1"]
    given += [f"recipe.cache_dir={recipe_cache}", "trainer.val_before_train=false"]
    given.append("trainer.default_local_dir=out")
    ended = python("no_time.py", *given, cwd=tmp_path)
    assert ended.returncode == 0 and "validation after step 2 is abandoned" in ended.stderr, ended.stderr
    assert why_it_ended(tmp_path) == "SIGTERM received" and (tmp_path / "out" / "requeue").exists()
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["last_val_accuracy"] is None
    for _ in range(2):
        ended = hydraflow("main_ppo", *given, cwd=tmp_path)
        assert ended.returncode == 0 and why_it_ended(tmp_path) == "all steps done", ended.stderr
        found = [line["step"] for line in read_steps(tmp_path / "out") if "val-aux/failed_rows" in line]
        assert found == [2] and (tmp_path / "out" / "final_model").exists()
    assert "all 2 steps are done; nothing was started" in ended.stdout
    shutil.rmtree(tmp_path / "out" / "final_model")
    ended = hydraflow("main_ppo", *given, cwd=tmp_path)
    assert ended.returncode == 0 and (tmp_path / "out" / "final_model").exists(), "a model that was removed"
