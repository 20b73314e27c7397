"""One process of a pool: starting it, talking to it, ending it, and tracking its current row.

In: the configuration, then chunks of rows. Out: their results as they arrive, the process's deadline, and why
it ended. Every wait has a limit. The process is a supervisor (`child.supervised`), whose child runs the
function; it ends everything that the function started. Left out on purpose: `multiprocessing.Process`, which
imports the main program again in every child.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydraflow.errors import EnvironmentFault, Problem
from hydraflow.rewards.calling import settings_of
from hydraflow.rewards.child import NO_ROW, PROGRESS_BYTES, RowProgress, supervised
from hydraflow.rewards.config import RewardConfig
from hydraflow.rewards.custom import SECTION
from hydraflow.rewards.frames import FrameSocket
from hydraflow.rewards.printed import PrintedReader, in_one_line
from hydraflow.rewards.row_time import QueueTime, over_at
from hydraflow.rewards.selection import KEY

logger = logging.getLogger(__name__)

GRACE_SECONDS = 1.0
"""Seconds beyond a row's limit for a process to notice its own alarm."""
START_SECONDS = 120.0
"""Seconds for a process to start and import a reward function."""
SEND_SECONDS = 30.0
"""Seconds for it to read a chunk of rows."""
EXIT_SECONDS = 5.0
"""Seconds for a process to exit after it has closed its connection."""
END_SECONDS = 10.0
"""Seconds for its supervisor to end it; longer than the supervisor itself waits."""
PRINTED_SECONDS = 1.0
"""Seconds for its last output to reach the log."""
LONGEST_ANSWER = 2**30
"""Bytes; a longer one is not ours: the reward function wrote to the socket."""
MARK = "HYDRAFLOW_REWARD_PROCESS"
"""Environment variable that all descendants of a process inherit."""
_BOOT = (
    f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {supervised.__module__} import supervised"
    "; supervised(*map(int, sys.argv[2:]))"
)


class RewardProcess:
    """A scoring process: its socket, its shared progress memory, and its pending rows."""

    def __init__(self, config: RewardConfig):
        self.at_once = 1
        """Maximum rows that it scores concurrently; known once it is ready."""
        self.proven = False
        """Whether it has scored a row: then dying while idle is an accident, not a fault of the set-up."""
        self._path_key = KEY if config.functions else f"{SECTION}.path"
        self._path = config.custom_reward_function.path
        self._queue_time: QueueTime | None = None
        """Queue time of the function's process, once it is ready."""
        self._pending: dict[int, int] = {}
        """Place in the chunk -> row, in order, of the rows that it has not answered."""
        self._started = time.monotonic()
        shared = os.memfd_create("hydraflow-reward")
        os.truncate(shared, PROGRESS_BYTES)
        self._progress = RowProgress(shared)
        self._progress.note(NO_ROW, self._started)
        ours, theirs = socket.socketpair()
        ours.settimeout(SEND_SECONDS)
        self.frames = FrameSocket(ours, most=LONGEST_ANSWER)
        self._leash, held = socket.socketpair()
        self._mark = secrets.token_hex(16)
        printed, printer = os.pipe()
        handed = [theirs.fileno(), shared, held.fileno()]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path), *map(str, handed)],
            stdin=subprocess.DEVNULL,
            stdout=printer,  # not our own stdout, which is reserved for a command's report
            stderr=printer,
            pass_fds=handed,
            start_new_session=True,
            env={**os.environ, MARK: self._mark},
        )
        theirs.close()
        held.close()
        os.close(shared)
        os.close(printer)
        self._printed = PrintedReader(printed, 1 / max(1, config.num_workers))
        self._printed.start()
        with suppress(OSError):  # it has already died; waiting for its greeting will report why
            self.frames.send(settings_of(config))

    def problems(self) -> list[Problem]:
        """Why it cannot score; empty when it can. Waits for it, at most START_SECONDS from its start."""
        if self._queue_time is not None:
            return []
        rule, greeting = f"its import did not finish within {START_SECONDS:g} seconds", None
        try:
            greeting = self._greeting()
        except (EOFError, OSError, ValueError):
            rule = f"while it was imported, it {self.exit_reason()}"
        if greeting is None:
            remedy = "correct the code that runs when the file is imported"
            return [Problem(self._path_key, self._path, rule, remedy)]
        if "refused" in greeting:
            return [Problem(*map(in_one_line, fields)) for fields in greeting["refused"]]
        self._queue_time, self.at_once = QueueTime(greeting["pid"]), greeting["at_once"]
        return []

    @property
    def pending(self) -> list[int]:
        """Rows that it has not answered; none: it is idle."""
        return list(self._pending.values())

    def send(self, chunk: list[int], rows: Sequence[Any]) -> None:
        """Sends the rows with these numbers; waits for the process to be ready first, and raises
        EnvironmentFault when it cannot score."""
        if problems := self.problems():
            rules = "; ".join(problem.rule for problem in problems)
            raise EnvironmentFault(f"a reward process cannot load the reward function: {rules}")
        self._pending = dict(enumerate(chunk))
        self._progress.note(NO_ROW, time.monotonic())
        try:
            self.frames.send([rows[i] for i in chunk])
        except OSError:
            return  # it died, which reading reports, or does not read and will miss its deadline

    def receive(self) -> list[tuple[int, Any]]:
        """The (row, result) pairs that have arrived. EOFError or ConnectionError when the process is gone,
        ValueError when the data is not its answers.
        """
        answers = [answer for message in self.frames.arrived() for answer in _checked_results(message)]
        if unknown := [place for place, _ in answers if place not in self._pending]:
            raise ValueError(f"an answer to row {unknown[0]}, which was not sent")
        self.proven = self.proven or bool(answers)
        return [(self._pending.pop(place), result) for place, result in answers]

    def current_row(self) -> int | None:
        """Number of its current row, the oldest of several; None before the first row of a chunk."""
        return self._pending.get(self._progress.read()[0])  # None also between an answer and the next row

    def suspects(self) -> list[int]:
        """Its active rows if there are several: any of them may have ended it."""
        active = self.pending[: self.at_once] if self.current_row() is not None else []
        return active if len(active) > 1 else []

    def deadline(self) -> float:
        """Time (time.monotonic) by which it must have moved on to another row."""
        number, since, waited, limit = self._progress.read()
        if number == NO_ROW or self._queue_time is None:
            return since + START_SECONDS
        return over_at(since, limit, self._queue_time.seconds() - waited) + GRACE_SECONDS

    def exit_reason(self) -> str:
        """Why its connection closed, as the predicate of a sentence."""
        try:
            code = self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed the connection of its process"
        return f"ended its process ({f'signal {-code}' if code < 0 else f'exit code {code}'})"

    def was_killed(self) -> bool:
        """Whether it ended by SIGKILL."""
        return self._process.returncode == -signal.SIGKILL

    def signal_end(self) -> None:
        """Asks its supervisor to end it and everything that it has started."""
        self._leash.close()

    def end(self) -> None:
        """Ends the process and releases its resources."""
        self.signal_end()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning(
                "the supervisor of a reward process did not end it within %g seconds and is killed",
                END_SECONDS,
            )
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        if self.was_killed():
            _kill_marked(self._mark)  # in case the supervisor was killed
        self._printed.join(PRINTED_SECONDS)
        self.frames.close()
        self._progress.close()
        if self._queue_time is not None:
            self._queue_time.close()

    def _greeting(self) -> Any:
        """Its first message; None if it does not arrive in time."""
        poll = select.poll()
        poll.register(self.frames.fileno(), select.POLLIN)
        while (left := self._started + START_SECONDS - time.monotonic()) > 0:
            if poll.poll(left * 1000) and (messages := self.frames.arrived()):
                return messages[0]
        return None


def _kill_marked(mark: str) -> None:
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended, or belongs to another user
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


def _checked_results(message: Any) -> list[Any]:
    """The numbered results in a message of the function's process, which is untrusted."""
    if not isinstance(message, list) or not all(_is_answer(answer) for answer in message):
        raise ValueError("not a list of results")
    return message


def _is_answer(answer: Any) -> bool:
    match answer:
        case [int(), [float() | int() | None, dict(), str() | None]]:
            return True
    return False
