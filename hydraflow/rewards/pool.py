"""Scores rows in processes of their own, so that no reward function can hang or end a run.

In: rows of (data source, response text, ground truth, extra info). Out: one result per row, in the order of the rows.
A row that raises, takes too long, ends its process or returns no finite number scores `failure_score`, with the reason.
The time limit is kept twice: by an alarm inside the process, and, where code never returns to Python, by the parent, which
kills the process some grace after the limit and starts another.
Left out on purpose: `multiprocessing.Process`, which imports the main program again in every child. A child here starts from
`rewards/child.py` alone and speaks JSON over a socket.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NamedTuple

from hydraflow.errors import EnvironmentFault
from hydraflow.rewards.child import NO_ROW, Progress, load, score_here
from hydraflow.rewards.config import RewardConfig

logger = logging.getLogger(__name__)

GRACE_SECONDS = 1.0
"""What a process gets beyond a row's limit to notice its own alarm."""
START_SECONDS = 120.0
"""What a process gets to start and to import a reward function."""
STANDARD_ERROR = 2
"""File number."""
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from hydraflow.rewards.child import main; main(*map(int, sys.argv[2:]))"


class RewardRow(NamedTuple):
    """One response to score."""

    data_source: str
    solution_str: str
    """The response's text, without special tokens."""
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclass(frozen=True)
class RewardResult:
    """The score of one row."""

    score: float
    extra: dict[str, float] = field(default_factory=dict)
    """Other numbers that the function returned, such as acc."""
    failed: str | None = None
    """Why the row scored failure_score; None when it did not fail."""


class RewardPool:
    """`config.num_workers` processes that score rows, one row at a time each.

    They start at `start()`, else with the first `score`; call it early, since their start is then hidden behind other work.
    One thread may use a pool at a time.

    >>> with RewardPool(RewardConfig()) as pool:
    ...     [r.score for r in pool.score([RewardRow("arithmetic", "042", "042", {}), RewardRow("arithmetic", "24", "042", {})])]
    [1.0, 0.0]
    """

    def __init__(self, config: RewardConfig):
        self.config = config
        self._workers: list[_Worker] = []
        self._function: Callable[..., Any] | None = None
        """Of a pool without processes, once it was needed."""

    def start(self) -> None:
        """Starts the processes without waiting for them."""
        while len(self._workers) < self.config.num_workers:
            self._workers.append(_Worker(self.config))

    def score(self, rows: Sequence[RewardRow]) -> list[RewardResult]:
        """Results in the order of `rows`. Raises `EnvironmentFault` when a process cannot start."""
        if self.config.num_workers == 0:
            self._function = self._function or load(settings_of(self.config))
            return [self._result(*result) for result in score_here(self._function, rows)]
        self.start()
        queue = deque(range(len(rows)))
        results: dict[int, RewardResult] = {}
        try:
            while len(results) < len(rows):
                self._hand_out(rows, queue)
                self._collect(results, queue)
        except BaseException:
            self.close()  # answers that are still to come belong to these rows, not to those of the next call
            raise
        return [results[row] for row in range(len(rows))]

    def close(self) -> None:
        """Ends the processes."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _hand_out(self, rows: Sequence[RewardRow], queue: deque[int]) -> None:
        for worker in self._workers:
            if queue and not worker.busy:
                worker.send(_take_chunk(queue, len(self._workers)), rows)

    def _collect(self, results: dict[int, RewardResult], queue: deque[int]) -> None:
        """Waits for answers, or for the first time limit that a process breaks."""
        busy = {worker.connection: worker for worker in self._workers if worker.busy}
        patience = min(worker.deadline() for worker in busy.values()) - time.monotonic()
        # A deadline moves closer when a process goes from loading to its first row, so never wait for longer than a row may take.
        answered = wait(list(busy), max(0.0, min(patience, self.config.timeout + GRACE_SECONDS)))
        for connection in answered:
            self._receive(busy[connection], results, queue)  # type: ignore[index]
        for connection, worker in busy.items():
            if connection not in answered and worker.deadline() < time.monotonic():
                reason = f"took longer than {self.config.timeout:g} seconds and could not be interrupted"
                self._replace(worker, reason, results, queue)

    def _receive(self, worker: _Worker, results: dict[int, RewardResult], queue: deque[int]) -> None:
        try:
            answers = worker.receive()
        except (EOFError, ConnectionError):
            self._replace(worker, f"ended its process ({worker.exit_reason()})", results, queue)
            return
        for row, (score, extra, failed) in answers:
            results[row] = self._result(score, extra, failed)

    def _result(self, score: float | None, extra: dict[str, float], failed: str | None) -> RewardResult:
        return RewardResult(self.config.failure_score, {}, failed) if score is None else RewardResult(score, extra)

    def _replace(self, worker: _Worker, reason: str, results: dict[int, RewardResult], queue: deque[int]) -> None:
        """Fails the row that `worker` is at, puts its other unanswered rows back and starts another process in its place."""
        culprit = worker.current_row()
        worker.end()
        if culprit is None and not worker.proven:
            raise EnvironmentFault(f"a reward process {reason} before it scored a row, while it was starting or loading its function")
        if culprit is not None:
            results[culprit] = RewardResult(self.config.failure_score, {}, reason)
        logger.warning("a reward function %s; its process was replaced", reason)
        queue.extendleft(row for row in reversed(worker.pending) if row != culprit)
        self._workers[self._workers.index(worker)] = _Worker(self.config)


def settings_of(config: RewardConfig) -> dict[str, Any]:
    """What a process that scores is told."""
    custom = config.custom_reward_function
    return {"path": custom.path, "name": custom.name, "reward_kwargs": custom.reward_kwargs, "timeout": config.timeout}


def _take_chunk(queue: deque[int], workers: int) -> list[int]:
    """The next rows for one of `workers`: all for one alone, else half of a fair share, so that slow rows even out."""
    size = len(queue) if workers == 1 else math.ceil(len(queue) / (2 * workers))
    return [queue.popleft() for _ in range(size)]


class _Worker:
    """One process: its socket, the memory in which it notes its progress, and the rows it has not answered yet."""

    def __init__(self, config: RewardConfig):
        self.pending: list[int] = []
        self._limit = config.timeout
        self._ready = False
        self.proven = False
        """Whether it has scored a row: then its death while it was idle is an accident, not a fault of the set-up."""
        self._offset = 0  # rows of the chunk that are answered
        self._started = time.monotonic()
        shared = os.memfd_create("hydraflow-reward")
        os.truncate(shared, 16)
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno()), str(shared)]
        with theirs:
            # What a function prints goes to standard error: the standard output of a command is its report.
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=STANDARD_ERROR, pass_fds=[theirs.fileno(), shared])
        self._progress = Progress(shared)
        os.close(shared)
        self._progress.note(NO_ROW, self._started)
        self.connection = Connection(ours.detach())
        self.connection.send_bytes(json.dumps(settings_of(config)).encode())

    @property
    def busy(self) -> bool:
        """Whether rows are out that it has not answered."""
        return bool(self.pending)

    def send(self, chunk: list[int], rows: Sequence[RewardRow]) -> None:
        """Sends the rows with these numbers; waits for the process to be ready first."""
        self._wait_until_ready()
        self.pending, self._offset = chunk, 0
        self._progress.note(NO_ROW, time.monotonic())
        try:
            self.connection.send_bytes(json.dumps([rows[i] for i in chunk]).encode())
        except ConnectionError:
            return  # it died meanwhile: reading from it says so

    def receive(self) -> list[tuple[int, Any]]:
        """The (row, result) pairs that have come. Raises EOFError or ConnectionError when the process is gone."""
        answers = json.loads(self.connection.recv_bytes())
        answered, self.pending = self.pending[: len(answers)], self.pending[len(answers) :]
        self._offset += len(answers)
        self.proven = True
        return list(zip(answered, answers, strict=True))

    def current_row(self) -> int | None:
        """Number of the row that it is at; None before the first row of a chunk."""
        number, _ = self._progress.read()
        return None if number == NO_ROW else self.pending[number - self._offset]

    def deadline(self) -> float:
        """When (time.monotonic) it should have gone on to another row."""
        number, since = self._progress.read()
        return since + (START_SECONDS if number == NO_ROW else self._limit + GRACE_SECONDS)

    def exit_reason(self) -> str:
        """How the process ended."""
        code = self._process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def end(self) -> None:
        """Ends the process and gives back what it held."""
        self.connection.close()
        self._process.kill()
        self._process.wait()
        self._progress.close()

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        remaining = self._started + START_SECONDS - time.monotonic()
        if not self.connection.poll(max(0.0, remaining)):
            raise EnvironmentFault(f"a reward process was not ready after {START_SECONDS:g} seconds")
        try:
            greeting = json.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise EnvironmentFault(f"a reward process ended while it was starting ({self.exit_reason()})") from error
        if "refused" in greeting:
            raise EnvironmentFault(f"a reward process cannot load the reward function: {'; '.join(greeting['refused'])}")
        self._ready = True
