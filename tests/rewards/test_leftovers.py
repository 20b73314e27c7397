"""What a reward function starts, and what it may do to its own process: nothing is left behind, and no wait
is without an end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hydraflow.rewards import worker
from hydraflow.rewards.config import CustomRewardConfig, RewardConfig
from hydraflow.rewards.pool import RewardPool, RewardResult, RewardRow

pytestmark = pytest.mark.slow(short=True)  # they wait for processes that take too long

MISCHIEF = """
import itertools, os, signal, subprocess, sys, time

def socket_of_the_pool():
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                return number
        except OSError:
            pass

def stuck():
    any(itertools.repeat(False))  # a loop in C: no Python handler runs

def compute_score(data_source, solution_str, ground_truth, extra_info):
    found = {"score": 1.0, "pid": os.getpid(), "supervisor": os.getppid()}
    if solution_str == "child":
        found["child"] = subprocess.Popen(["sleep", "311"]).pid
    if solution_str == "daemon":  # in a session of its own, its parent gone
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.setsid()
            daemon = subprocess.Popen(["sleep", "312"], start_new_session=True)
            os.write(writer, str(daemon.pid).encode())
            os._exit(0)
        found["child"] = int(os.read(reader, 20))
    if solution_str == "hang with a child":
        child = subprocess.Popen(["sleep", "313"], start_new_session=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM, signal.SIGTERM])
        with open(ground_truth + ".new", "w") as file:
            file.write(f"{os.getpid()} {os.getppid()} {child.pid}")
        os.rename(ground_truth + ".new", ground_truth)
        time.sleep(600)
    if solution_str == "fork and exit":  # the copy holds the socket open
        if os.fork():
            os._exit(6)
        time.sleep(600)
    if solution_str == "close":
        os.closerange(3, 65536)  # sockets keep the number that they have in the pool's process
        stuck()
    if solution_str == "partial":
        os.write(socket_of_the_pool(), b"\\0\\0\\0\\0\\0\\0\\1\\0half a message")
        stuck()
    if solution_str == "dribble":
        import threading
        def dribble():
            while True:
                os.write(number, b"\\0")
                time.sleep(0.05)
        number = socket_of_the_pool()
        os.write(number, b"\\0\\0\\0\\0\\1\\0\\0\\0")
        threading.Thread(target=dribble, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        time.sleep(600)
    if solution_str == "rubbish":
        os.write(socket_of_the_pool(), b"\\0\\0\\0\\0\\0\\0\\0\\2{]" * 2)
        stuck()
    if solution_str == "answers":
        os.write(socket_of_the_pool(), b"\\0\\0\\0\\0\\0\\0\\0\\7[[],[]]")
        stuck()
    return found
"""


@pytest.fixture
def config(tmp_path: Path) -> RewardConfig:
    (tmp_path / "mischief.py").write_text(MISCHIEF)
    return RewardConfig(
        CustomRewardConfig(path=str(tmp_path / "mischief.py")), timeout=0.5, failure_score=-1.0
    )


def rows(*solutions: str) -> list[RewardRow]:
    return [RewardRow("any", solution, "", {}) for solution in solutions]


def lives(pid: float) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, f"waited 60 s for {what}"
        time.sleep(0.02)


@pytest.mark.parametrize("how", ["child", "daemon"])
def test_what_a_function_starts_ends_with_the_pool(config: RewardConfig, how: str) -> None:
    config.timeout = 30.0
    with RewardPool(config) as pool:
        (found,) = pool.score(rows(how))
        assert lives(found.extra["child"]), found
        assert pool.score(rows("fine"))[0].score == 1.0 and lives(found.extra["child"]), (
            "it may serve the rows that follow"
        )
    assert [lives(found.extra[who]) for who in ("child", "pid", "supervisor")] == [False, False, False]


def test_what_a_function_starts_ends_with_its_process(config: RewardConfig) -> None:
    config.timeout = 30.0
    with RewardPool(config) as pool:
        (found,) = pool.score(rows("daemon"))
        os.kill(int(found.extra["pid"]), signal.SIGKILL)
        wait_until(lambda: not lives(found.extra["child"]), "the daemon of a function that was killed")


OWNER = """
import sys
from hydraflow.rewards.config import CustomRewardConfig, RewardConfig
from hydraflow.rewards.pool import RewardPool, RewardRow
config = RewardConfig(CustomRewardConfig(path=sys.argv[1]), timeout=600.0)
RewardPool(config).score([RewardRow("any", "hang with a child", sys.argv[2], {})])
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_pool_s_process_however_it_ends(
    config: RewardConfig, tmp_path: Path, how: signal.Signals
) -> None:
    pids = tmp_path / "pids"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(config.custom_reward_function.path), str(pids)]
    )
    try:
        wait_until(pids.exists, "the function to hang")
        started = [int(pid) for pid in pids.read_text().split()]
        assert all(map(lives, started))
        owner.send_signal(how)
        wait_until(lambda: not any(map(lives, started)), f"{started} to end with their owner")
    finally:
        owner.kill()
        owner.wait(60)


def test_a_function_whose_supervisor_is_killed_ends_and_is_replaced(config: RewardConfig) -> None:
    with RewardPool(config) as pool:
        (found,) = pool.score(rows("fine"))
        os.kill(int(found.extra["supervisor"]), signal.SIGKILL)
        wait_until(lambda: not lives(found.extra["pid"]), "the function's process")
        assert pool.score(rows("fine"))[0].score == 1.0


def test_what_a_function_started_ends_even_where_its_supervisor_was_killed(config: RewardConfig) -> None:
    with RewardPool(config) as pool:
        (found,) = pool.score(rows("daemon"))
        os.kill(int(found.extra["supervisor"]), signal.SIGKILL)
        wait_until(lambda: not lives(found.extra["pid"]), "the function's process")
        assert lives(found.extra["child"])
    wait_until(lambda: not lives(found.extra["child"]), "the daemon of a closed pool")


def test_a_pool_outlives_the_thread_that_started_it(config: RewardConfig) -> None:
    with RewardPool(config) as pool:
        found: list[RewardResult] = []
        thread = threading.Thread(target=lambda: found.extend(pool.score(rows("fine"))))
        thread.start()
        thread.join(60)
        (again,) = pool.score(rows("fine"))
        assert again.extra["pid"] == found[0].extra["pid"]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("close", "closed the connection of its process"),
        ("partial", "took longer than 0.5 seconds and could not be interrupted"),
        ("dribble", "took longer than 0.5 seconds and could not be interrupted"),
        ("rubbish", "wrote to the connection that its process answers on"),
        ("answers", "wrote to the connection that its process answers on"),
        ("fork and exit", "ended its process (exit code 6)"),
    ],
)
def test_a_function_that_breaks_its_connection_fails_its_row_alone(
    config: RewardConfig, monkeypatch: pytest.MonkeyPatch, bad: str, reason: str
) -> None:
    monkeypatch.setattr(worker, "EXIT_SECONDS", 2.0 if bad == "close" else 60.0)
    with RewardPool(config) as pool:
        first, failed, last = pool.score(rows("fine", bad, "fine"))
    assert (failed.score, failed.failed) == (-1.0, reason)
    assert (first.score, last.score) == (1.0, 1.0)


def test_a_process_that_does_not_read_is_replaced(
    config: RewardConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "SEND_SECONDS", 0.5)
    config.timeout = 60.0
    with RewardPool(config) as pool:
        (found,) = pool.score(rows("fine"))
        os.kill(int(found.extra["pid"]), signal.SIGSTOP)
        monkeypatch.setattr(worker, "START_SECONDS", 2.0)
        stopped = pool._workers[0]
        stopped.send([0], rows("x" * 10_000_000))  # more than the socket holds
        assert stopped.deadline() < time.monotonic() + 3
        monkeypatch.setattr(worker, "START_SECONDS", 60.0)
    assert not lives(found.extra["pid"])
