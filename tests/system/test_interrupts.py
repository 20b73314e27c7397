"""How a command ends: what one Ctrl-C does, what more of them do, and that no end lasts for ever. Each
command here is a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hydraflow.errors import GuardStop
from hydraflow.system.interrupts import INTERRUPTED

HEAD = """
import subprocess, sys, threading, time
from hydraflow.system import interrupts
from hydraflow.compose.launch import run_guarded
from hydraflow.errors import GuardStop
from hydraflow.system.interrupts import SHUTDOWN, command, ending

def say(*words):
    print(*words, flush=True)

def clean_up(seconds, error):
    with ending(error):
        say("ending")
        time.sleep(seconds)
        say("cleaned up")

"""
WORKS = """
def work():
    child = subprocess.Popen(["sh", "-c", "sleep 300 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    try:
        say("works", child.pid, child.stdout.readline().strip())
        while True:  # a signal just before a long sleep would be handled after it
            time.sleep(0.05)
    except KeyboardInterrupt as error:
        clean_up({seconds}, error)
        raise
SHUTDOWN.patience = {patience}
interrupts.LIMIT = {limit}
command(lambda: run_guarded(work))
"""


IN_TORCH = """
import os, signal
import torch
from torch.nested._internal.nested_int import NestedIntNode
from hydraflow.protocol import ragged

calls, is_int = 0, NestedIntNode.is_int

def interrupted(node):
    global calls
    calls += 1
    if calls == {call}:
        os.kill(os.getpid(), signal.SIGINT)
    return is_int(node)

NestedIntNode.is_int = interrupted

def work():
    try:
        ragged.from_parts(torch.arange(3), torch.tensor([1, 2]))
    except BaseException as error:
        say(type(error).__name__)
        raise

command(lambda: run_guarded(work))
"""


class Command:
    """A process that runs a program; both of its streams are read as one."""

    def __init__(self, program: str):
        words = [sys.executable, "-c", textwrap.dedent(HEAD) + program]
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        self.stdout = self.process.stdout

    def line(self) -> str:
        return self.stdout.readline().rstrip("\n")

    def rest(self) -> str:
        return self.stdout.read()

    def interrupt(self, times: int = 1) -> None:
        for _ in range(times):
            self.process.send_signal(signal.SIGINT)
            time.sleep(0.1)


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    """Those that a test starts; none outlives it."""
    started: list[Command] = []
    yield started
    for one in started:
        one.process.kill()
        one.process.wait()
        one.stdout.close()


def begin(commands: list[Command], program: str) -> Command:
    commands.append(Command(program))
    return commands[-1]


def begin_to_work(
    commands: list[Command], *, seconds: float, patience: float = 60.0, limit: float = 60.0
) -> tuple[Command, list[int]]:
    """A command that works, and its processes; once it is interrupted, it cleans up for that many seconds."""
    one = begin(commands, WORKS.format(seconds=seconds, patience=patience, limit=limit))
    word, *pids = one.line().split()
    assert word == "works"
    return one, [int(pid) for pid in pids]


def assert_gone(pids: list[int]) -> None:
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10)
    assert len(pids) == 2 and all(one.status() == psutil.STATUS_ZOMBIE for one in alive)


@pytest.mark.parametrize(("call", "raised"), [(1, "KeyboardInterrupt"), (2, "TypeError")])
def test_one_that_torch_turns_into_an_error_of_its_own(
    commands: list[Command], call: int, raised: str
) -> None:
    """It reaches Python code that torch's argument parser calls."""
    one = begin(commands, IN_TORCH.format(call=call))
    assert one.rest() == f"{raised}\ninterrupted\n"
    assert one.process.wait() == INTERRUPTED


def test_an_error_about_an_interrupt_that_never_came_is_an_error(commands: list[Command]) -> None:
    one = begin(
        commands, "def work():\n    raise TypeError('KeyboardInterrupt')\ncommand(lambda: run_guarded(work))"
    )
    assert "TypeError: KeyboardInterrupt" in one.rest()
    assert one.process.wait() == 1


def test_more_of_them_do_not_cut_the_end_short(commands: list[Command]) -> None:
    one, pids = begin_to_work(commands, seconds=1.5)
    one.interrupt(6)
    assert one.rest() == "ending\ncleaned up\ninterrupted\n"
    assert one.process.wait(30) == 130
    assert_gone(pids)


def test_an_end_that_hangs_can_be_interrupted(commands: list[Command]) -> None:
    one, pids = begin_to_work(commands, seconds=300, patience=0.5)
    one.interrupt()
    assert one.line() == "ending"
    time.sleep(1.0)
    one.interrupt()
    assert one.rest() == "the shutdown was interrupted: ended at once\n"
    assert one.process.wait(30) == 130
    assert_gone(pids)


def test_an_end_that_hangs_has_a_limit(commands: list[Command]) -> None:
    one, pids = begin_to_work(commands, seconds=300, limit=1.0)
    one.interrupt()
    assert one.rest() == "ending\nthe shutdown took more than 1 seconds: ended at once\n"
    assert one.process.wait(30) == 130
    assert_gone(pids)


def test_what_ended_the_run_is_said_and_decides_the_code(commands: list[Command]) -> None:
    one = begin(
        commands,
        """
def work():
    error = GuardStop("too many bad steps")
    clean_up(300, error)
    raise error
interrupts.LIMIT = 0.5
command(lambda: run_guarded(work))
""",
    )
    assert (
        one.rest() == "ending\ntoo many bad steps\nthe shutdown took more than 0.5 seconds: ended at once\n"
    )
    assert one.process.wait(30) == GuardStop.exit_code


def test_a_thread_that_hangs_does_not_keep_the_process(commands: list[Command]) -> None:
    one = begin(
        commands,
        """
threading.Thread(target=time.sleep, args=(300,)).start()
interrupts.EXIT_LIMIT = 0.5
command(lambda: 3)
""",
    )
    assert one.rest() == "Python has not exited in 0.5 seconds: ended at once\n"
    assert one.process.wait(30) == 3


@pytest.mark.parametrize(
    ("main", "code", "said"),
    [
        ("lambda: 5", 5, ""),
        ("lambda: sys.exit(4)", 4, ""),
        ("lambda: sys.exit()", 0, ""),
        ("lambda: sys.exit('no')", 1, "no\n"),
    ],
)
def test_the_code_is_handed_on(commands: list[Command], main: str, code: int, said: str) -> None:
    one = begin(commands, f"command({main})")
    assert (one.rest(), one.process.wait(30)) == (said, code)


def test_a_job_in_the_background_stays_deaf(commands: list[Command]) -> None:
    """A shell has SIGINT ignored in what it starts with `&`."""
    program = "import signal\ncommand(lambda: int(signal.getsignal(signal.SIGINT) is signal.SIG_IGN) + 5)"
    shell = f"trap '' INT; exec {sys.executable} -c \"$0\""
    done = subprocess.run(
        ["sh", "-c", shell, HEAD + program], check=False, timeout=60, env=dict(os.environ), cwd=Path.cwd()
    )
    assert done.returncode == 6
