"""A Slurm of two nodes on this machine, and commands to it as a user gives them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from jobs.command import processes_with, read_steps

from hydraflow.system.role_logs import STACKS

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("two_nodes.sh")


@dataclass(frozen=True)
class Job:
    """A submitted job."""

    cluster: Cluster
    number: str
    home: Path
    name: str

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return self.home / "runs" / f"arithmetic-job{self.number}"

    def said(self) -> str:
        """Its log, of all its starts."""
        log = self.home / "runs" / "slurm" / f"{self.name}-{self.number}.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def state(self) -> str:
        """PENDING, RUNNING, COMPLETED, ..."""
        return self.fact("JobState")

    def fact(self, name: str) -> str:
        """A field of `scontrol show job`."""
        found = re.search(rf"\b{name}=(\S+)", self.cluster.ask("scontrol", "show", "job", self.number))
        return found[1] if found else ""

    def steps(self) -> list[int]:
        """The steps that it has logged."""
        file = self.folder / "metrics.jsonl"
        return [int(line["step"]) for line in read_steps(self.folder)] if file.exists() else []

    def account(self) -> str:
        """The end of its log, with the stacks of its controller, and Slurm's side of it."""
        for controller in processes_with(["-m\0hydraflow.main_ppo", f"SLURM_JOB_ID={self.number}\0"]):
            with suppress(ProcessLookupError):
                os.kill(controller, STACKS)
        time.sleep(1)
        facts = self.cluster.ask("scontrol", "show", "job", self.number)
        return f"{self.said()[-8000:]}\n{facts}\n{self.cluster.account()}"

    def await_state(self, *states: str, seconds: float) -> str:
        """Waits until it is in one of these states."""
        self.cluster.wait_for(
            lambda: self.state() in states, seconds, f"job {self.number} to be {states}", self.account
        )
        return self.state()

    def await_step(self, step: int, seconds: float = 400) -> None:
        """Waits until it has logged that many steps."""
        what = f"step {step} of job {self.number}"
        self.cluster.wait_for(
            lambda: self.steps()[-1:] >= [step] or self.state() == "FAILED", seconds, what, self.account
        )
        assert self.state() == "RUNNING", self.said()[-4000:]

    def cancel(self) -> None:
        """Ends it."""
        self.cluster.ask("scancel", self.number)


class Cluster:
    """`two_nodes.sh`, up while in its block."""

    def __init__(self, folder: Path):
        self.folder = folder / "cluster"
        self.cache = folder / "cache"
        self.environ = {
            # What the local Ray of other tests has set in this process would forbid Slurm's nodes to join
            # one.
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
            "OMP_NUM_THREADS": "1",
            "HYDRAFLOW_DASHBOARD": "0",
        }

    def __enter__(self) -> Cluster:
        self.script("up")
        self.wait_for(
            lambda: self.nodes() == {"node1": "idle", "node2": "idle"},
            60,
            "both nodes to be idle",
            self.account,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ask("scancel", "--user=root")
        self.wait_for(
            lambda: not self.ask("squeue", "--noheader").strip(), 120, "all jobs to end", self.account
        )
        self.script("down")

    def script(self, command: str, *more: str) -> None:
        """Runs two_nodes.sh."""
        done = subprocess.run(
            [SCRIPT, command, self.folder, *more], stdin=subprocess.DEVNULL, timeout=120, check=False
        )
        assert done.returncode == 0, f"two_nodes.sh {command} failed"

    def ask(self, *words: str) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(
            words, env=self.environ, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout + done.stderr

    def nodes(self) -> dict[str, str]:
        """State of each node."""
        listed = self.ask("sinfo", "--noheader", "--Node", "--format=%N %t").split("\n")
        return dict(line.split() for line in listed if len(line.split()) == 2)

    def at_rest(self) -> bool:
        """Both nodes are idle, and no message to one of them is on its way or waits to be sent again."""
        queues = r"^Agent (?:count|thread count|queue size): *(\d+)"
        messages = re.findall(queues, self.ask("sdiag"), re.MULTILINE)
        return set(self.nodes().values()) == {"idle"} and messages == ["0"] * 3

    def account(self) -> str:
        """Why nodes are out of use, and what Slurm's processes say."""
        logs = (file.read_text()[-1500:] for file in sorted((self.folder / "log").glob("*")))
        return "\n".join([self.ask("sinfo", "--list-reasons"), *logs])

    def hydraflow(self, *words: str, home: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """`python -m hydraflow.words`."""
        command = [sys.executable, "-m", f"hydraflow.{words[0]}", *words[1:]]
        return subprocess.run(
            command, cwd=home, env=self.environ, capture_output=True, text=True, timeout=timeout, check=False
        )

    def submit(self, *words: str, home: Path, name: str = "job") -> Job:
        """A job on both nodes, submitted."""
        done = self.hydraflow(
            "slurm", "submit", "--nodes", "2", "--job-name", name, "--cpus-per-task", "4", *words, home=home
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return Job(self, re.findall(r"job (\d+) submitted", done.stdout)[0], home, name)

    def wait_for(
        self, condition: Callable[[], object], seconds: float, what: str, said: Callable[[], str]
    ) -> None:
        """Looks again and again until `condition` holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}:\n{said()}"
            time.sleep(1)  # a question costs 20 ms of a core, and most waits take a minute
