"""Runs hydraflow's commands as a user does, in a process of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked

SMALL_RECIPE = [
    "recipe.warm_start_steps=20",
    "recipe.warm_start_accuracy=1.0",
    "recipe.train_problems=600",
    "recipe.val_problems=32",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
]
"""Few problems, a short warm start and small steps: it learns next to nothing, but everything runs."""

STEPS_ALONE = ["trainer.val_before_train=false", "trainer.save_final_model=false", "trainer.logger=[file]"]
"""Nothing before the first step, nothing after the last, and no console."""
ONE_RANK = ["trainer.n_gpus_per_node=1", "trainer.threads_per_process=1"]
"""One process with one thread: several tests run at a time."""
LOCAL = ["trainer.debug.local=true", *ONE_RANK]
"""Without Ray, in one process: bit by bit what a run on one rank does (`test_debugging.py`), in a tenth of
the time."""

STARTED: list[Started] = []
"""Commands that were started in the background."""


def end_leftovers() -> None:
    """Kills what is left of them: a test that failed has not waited for its own."""
    while STARTED:
        for pid in STARTED[-1].processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        STARTED.pop()


def hydraflow(
    command: str, *overrides: str, cwd: Path, timeout: float = 240.0, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """`python -m hydraflow.<command> overrides`, with what it printed; `fresh` as in `python`."""
    return python("-m", f"hydraflow.{command}", *overrides, cwd=cwd, timeout=timeout, fresh=fresh)


def completed(
    command: str, *overrides: str, cwd: Path, timeout: float = 240.0, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """The same, of a command that must succeed."""
    done = hydraflow(command, *overrides, cwd=cwd, timeout=timeout, fresh=fresh)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def python(
    *words: str, cwd: Path, timeout: float = 240.0, fresh: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python words`, with what it printed.

    It runs in a fork of a process that has imported the libraries (`forked.py`); `fresh`: in a process that
    imports them itself. That is also what it gets where a test has changed the environment: libraries read it
    while they are imported.
    """
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return run(None if fresh else forked.server(environ), *words, cwd=cwd, environ=environ, timeout=timeout)


def run(
    server: forked.Server | None, *words: str, cwd: Path, environ: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """`python words` in a fork of the server, or in a process of its own."""
    if server is not None:
        return server.run(*words, cwd=cwd, environ=environ, timeout=timeout)
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@dataclass(frozen=True)
class Started:
    """A command that runs, in a session of its own, so that a signal to its group reaches all its processes
    as a terminal's does."""

    process: forked.Background | subprocess.Popen[bytes]
    log: Path
    mark: str
    """Is in the environment of all its processes that were not forked."""

    def said(self) -> str:
        """What it has printed."""
        return self.log.read_text()

    def processes(self) -> list[int]:
        """All its processes that live, its own first working directory being the folder of the log."""
        return processes_with([self.mark], cwd=self.log.parent)

    def ended(self, seconds: float) -> int:
        """Its exit code, once it and all its processes have ended; it may take `seconds`."""
        code = self.process.wait(timeout=seconds)
        deadline = time.monotonic() + 30
        while left := self.processes():
            assert time.monotonic() < deadline, f"still there: {[command_line(pid) for pid in left]}"
            time.sleep(0.1)
        return code


def start(command: str, *overrides: str, cwd: Path, fresh: bool = False) -> Started:
    """Starts `python -m hydraflow.<command> overrides`; what it prints goes into the file `log` of `cwd`.

    It is a fork of a process that has imported the libraries; `fresh`: it imports them itself.
    """
    mark = f"HYDRAFLOW_TEST_MARK={cwd}-{os.getpid()}"
    words = ["-m", f"hydraflow.{command}", *overrides]
    unmarked, path = {**os.environ, "OMP_NUM_THREADS": "1"}, cwd / "log"
    server = None if fresh else forked.server(unmarked)
    env = {**unmarked, **dict([mark.split("=")])}
    if server is not None:
        process: Any = server.start(*words, cwd=cwd, environ=env, log=path)
    else:
        with path.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=cwd, env=env, stdout=log, stderr=log, start_new_session=True
            )
    STARTED.append(Started(process, path, mark))
    return STARTED[-1]


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Looks again and again until `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.1)


def has_lines(path: Path, count: int) -> bool:
    """Whether a file is there and has that many lines."""
    return path.exists() and len(path.read_text().splitlines()) >= count


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read_numbers(folder: Path) -> list[dict[str, Any]]:
    """The same without times: what two runs can have alike."""
    timed = ("timing_s/", "perf/", "seconds")
    return [
        {name: value for name, value in line.items() if not name.startswith(timed)}
        for line in read_steps(folder)
    ]


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, a message with these words, no stack trace."""
    said = done.stdout + done.stderr
    assert done.returncode == 2, said[-3000:]
    assert "Traceback" not in said, said[-3000:]
    missing = [word for word in words if word not in said]
    assert not missing, f"{missing} not in:\n{said[-3000:]}"


def command_line(pid: int) -> str:
    """The start of a process's command line; empty if it has ended."""
    with suppress(OSError):
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:300]
    return ""


def processes_with(words: Sequence[str], *, cwd: Path | None = None) -> list[int]:
    """Processes whose command line or environment holds all words, or whose working directory is `cwd`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            there = (entry / "cwd").readlink()
        except OSError:
            continue
        if there == cwd or all(word.encode() in text for word in words):
            found.append(int(entry.name))
    return found


SUM_OF_DIGITS = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(int, filter(str.isdigit, solution_str))) / 100
"""


def write_sums(folder: Path, prompts: int) -> None:
    """`data.parquet` with that many prompts, and `reward.py`, which scores a response by its digits."""
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "prompt": [{"role": "user", "content": f"{number}+1="}],
            "data_source": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": "0"},
            "extra_info": {"index": number},
        }
        for number in range(prompts)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "data.parquet")
    (folder / "reward.py").write_text(SUM_OF_DIGITS)
