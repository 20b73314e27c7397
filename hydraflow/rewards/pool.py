"""Scores rows in separate processes, so that no reward function can hang or end a run.

In: rows of (data source, response text, ground truth, extra info). Out: one result per row, in the order of
the rows. A row that raises, takes too long, ends its process or returns no finite number scores
`failure_score`, with the reason. The time limit is enforced twice: by an alarm inside the process and, for
code that never returns to Python, by the pool, which ends the process shortly after the limit and starts
another. The processes themselves are in `worker.py`.
"""

from __future__ import annotations

import logging
import math
import select
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from hydraflow.errors import ConfigError, EnvironmentFault
from hydraflow.rewards.calling import RewardCall, load
from hydraflow.rewards.child import score_here
from hydraflow.rewards.config import RewardConfig
from hydraflow.rewards.printed import in_one_line
from hydraflow.rewards.selection import problems, selected
from hydraflow.rewards.worker import GRACE_SECONDS, RewardProcess

logger = logging.getLogger(__name__)


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
    """`config.num_workers` processes that score rows, each one at a time unless its function is asynchronous
    or takes batches.

    They start with `start()`, or else with the first `score`; call `start()` early to overlap it with other
    work. Only one thread may use a pool at a time.

    >>> rows = [RewardRow("arithmetic", answer, "042", {}) for answer in ("042", "24")]
    >>> with RewardPool(RewardConfig()) as pool:
    ...     [scored.score for scored in pool.score(rows)]
    [1.0, 0.0]
    """

    def __init__(self, config: RewardConfig):
        self.config = config
        self._workers: list[RewardProcess] = []
        self._function: RewardCall | None = None
        """The function of a pool without processes, loaded on first use."""
        self._retried: set[int] = set()
        """Rows of this call that are scored once more: their process was killed, perhaps from outside."""
        self._alone: set[int] = set()
        """Rows of this call that are scored alone, because a process died while it scored them with
        others."""
        self._has_failed = False
        """Whether a row of this call has failed, which is logged once."""

    def start(self) -> None:
        """Starts the processes without waiting for them."""
        while len(self._workers) < self.config.num_workers:
            self._workers.append(RewardProcess(self.config))

    def require_loaded(self) -> None:
        """Raises ConfigError when the functions cannot be loaded, including when a custom one's file hangs or
        exits the importing process. A pool without processes loads them in a temporary one; any other keeps
        the process that has loaded them."""
        if found := list(problems(self.config)):
            raise ConfigError(found)
        if self.config.custom_reward_function.path is None and not self.config.functions:
            return
        if self.config.num_workers == 0:
            check_function(self.config)
            return
        self.start()
        if found := self._workers[0].problems():
            self.close()
            raise ConfigError(found)

    def score(self, rows: Sequence[RewardRow]) -> list[RewardResult]:
        """Results in the order of `rows`; the first that fails is logged at once. Raises `EnvironmentFault`
        when a process cannot start."""
        self._retried, self._alone, self._has_failed = set(), set(), False
        if self.config.num_workers == 0:
            self._function = self._function or load(self.config)
            scored = score_here(self._function, rows)
            return [self._result(*result) for result in scored]
        self.start()
        queue = deque(range(len(rows)))
        results: dict[int, RewardResult] = {}
        try:
            while len(results) < len(rows):
                for worker in self._workers:
                    if queue and not worker.pending:
                        worker.send(self._take_chunk(queue), rows)
                self._collect(results, queue)
        except BaseException:
            self.close()  # pending answers belong to these rows, not to those of the next call
            raise
        return [results[row] for row in range(len(rows))]

    def close(self) -> None:
        """Ends the processes, with everything that the function started in them."""
        for worker in self._workers:
            worker.signal_end()  # signal all of them before waiting for any
        for worker in self._workers:
            worker.end()
        self._workers = []

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _collect(self, results: dict[int, RewardResult], queue: deque[int]) -> None:
        """Waits for answers and receives them; replaces processes that have exceeded their time limit."""
        busy = [worker for worker in self._workers if worker.pending]
        patience = min(worker.deadline() for worker in busy) - time.monotonic()
        # a deadline moves closer when a process goes from loading to its first row, so never wait longer than
        # a row may take
        answered = _readable(busy, max(0.0, min(patience, self.config.timeout + GRACE_SECONDS)))
        for worker in answered:
            self._receive(worker, results, queue)
        for worker in busy:
            if worker in self._workers and worker.pending and worker.deadline() < time.monotonic():
                reason = f"took longer than {self.config.timeout:g} seconds and could not be interrupted"
                self._replace(worker, reason, results, queue)

    def _receive(self, worker: RewardProcess, results: dict[int, RewardResult], queue: deque[int]) -> None:
        try:
            for row, result in worker.receive():
                results[row] = self._result(*result)
        except (EOFError, ConnectionError):
            self._replace(worker, worker.exit_reason(), results, queue)
        except ValueError:
            self._replace(worker, "wrote to the connection that its process answers on", results, queue)

    def _result(self, score: float | None, extra: dict[str, float], failed: str | None) -> RewardResult:
        if score is not None:
            return RewardResult(score, extra)
        if not self._has_failed:
            logger.warning("the reward function failed on a row: %s", in_one_line(failed or ""))
        self._has_failed = True
        return RewardResult(self.config.failure_score, {}, in_one_line(failed or ""))

    def _replace(
        self, worker: RewardProcess, reason: str, results: dict[int, RewardResult], queue: deque[int]
    ) -> None:
        """Ends `worker` and starts another process in its place. Its current row fails, unless it is to be
        retried; the others return to the queue.
        """
        culprit, suspects, killed = worker.current_row(), worker.suspects(), worker.was_killed()
        worker.end()
        if culprit is None and not worker.proven:
            raise EnvironmentFault(
                f"a reward process {reason} before it scored a row, while starting or loading its function"
            )
        if suspects:
            self._alone |= set(suspects)
            culprit = None
        if killed and culprit is not None and culprit not in self._retried:
            self._retried.add(culprit)
            culprit = None
        if culprit is not None:
            results[culprit] = self._result(None, {}, reason)
        logger.warning("a reward function %s; its process was replaced", reason)
        queue.extendleft(row for row in reversed(worker.pending) if row != culprit)
        self._workers[self._workers.index(worker)] = RewardProcess(self.config)

    def _take_chunk(self, queue: deque[int]) -> list[int]:
        """The next rows for a process: all if it is the only one or the function takes batches, else half of
        a fair share, to even out slow rows. A row of `_alone` is a chunk by itself."""
        workers = 1 if self.config.reward_manager.name == "batch" else len(self._workers)
        size = len(queue) if workers == 1 else math.ceil(len(queue) / (2 * workers))
        chunk = [queue.popleft()]
        while len(chunk) < size and self._alone.isdisjoint((chunk[0], queue[0])):
            chunk.append(queue.popleft())
        return chunk


def function_means(config: RewardConfig, results: Sequence[RewardResult]) -> dict[str, float]:
    """`reward/<name>`: the mean of each of `reward.functions` over the rows that it scored."""
    scored = [result.extra for result in results if result.failed is None]
    means = {}
    for label in [one.label for one in selected(config)] if config.functions else []:
        if values := [extra[label] for extra in scored if label in extra]:
            means[f"reward/{label}"] = sum(values) / len(values)
    return means


def check_function(config: RewardConfig) -> None:
    """`RewardPool.require_loaded` in a temporary pool of one process."""
    with RewardPool(replace(config, num_workers=1)) as pool:
        pool.require_loaded()


def _readable(workers: Sequence[RewardProcess], seconds: float) -> list[RewardProcess]:
    """The processes with data to read, after waiting at most `seconds` for the first."""
    poll = select.poll()
    by_number = {worker.frames.fileno(): worker for worker in workers}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(seconds * 1000)]
