"""Copies the output of a reward function to the log, as lines of text without control characters, and
rate-limited.

In: a pipe that the function's process and its children write to. Out: tagged lines in the process's log
file, which is rotated, or, in a process without log files, lines on standard error. The pipe is always
drained, so that printing never blocks; output above the rate limit is dropped, and the log says how much.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from hydraflow.system.role_logs import PRINTED, log_of_this_process

BYTES_PER_SECOND = 100_000.0
BURST_BYTES = 1_000_000.0
"""Burst size after a quiet period."""
LINE_BYTES = 16_384
"""Longer lines are split."""
TAG_BYTES = 64
"""Cost of a line besides its text."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
"""Sequences that terminals act on: colours, cursor movements, window titles."""
_CONTROLS = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Other characters that are not shown, or change what is shown; not the tab."""

Write = Callable[[str], None]


def readable(line: bytes) -> str:
    r"""A line as text without terminal control sequences; of a line that overwrites itself (a progress bar),
    the last state.

    >>> readable(b"10 %\r\x1b[31m20 %\x1b[0m\x00\r")
    '20 %'
    """
    return _shown(line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1])


def in_one_line(text: str) -> str:
    r"""Text from the user's code, made safe for our messages.

    >>> in_one_line("no \x1b[31msuch\nkey")
    'no such key'
    """
    return _shown(" ".join(text.splitlines()))


def _shown(text: str) -> str:
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


class LineSplitter:
    """Splits incoming bytes into lines, within a budget that grows with time."""

    def __init__(self, write: Write, share: float, clock: Callable[[], float] = time.monotonic):
        """`share`: this process's share of the limits, where several print."""
        self._write, self._clock = write, clock
        self._rate, self._most = BYTES_PER_SECOND * share, BURST_BYTES * share
        self._budget, self._since = self._most, clock()
        self._held = b""
        self._dropped = 0
        """Bytes dropped and not yet reported. While above 0 everything is dropped, until the budget allows a
        second's worth again."""

    def feed(self, data: bytes) -> None:
        """Adds bytes; writes each line when it is complete."""
        now = self._clock()
        self._budget, self._since = min(self._most, self._budget + (now - self._since) * self._rate), now
        if self._dropped:
            skipped, newline, data = data.partition(b"\n") if self._budget >= self._rate else (data, b"", b"")
            self._dropped += len(skipped) + len(newline)
            if not newline:
                return
            self._report()
        *lines, held = (self._held + data).split(b"\n")
        while len(held) > LINE_BYTES:
            lines, held = [*lines, held[:LINE_BYTES]], held[LINE_BYTES:]
        self._held = held
        for number, line in enumerate(lines):
            if self._budget < 0:
                self._dropped = sum(len(left) + 1 for left in lines[number:]) + len(held)
                self._held = b""
                return
            self._line(line)

    def end(self) -> None:
        """Writes an incomplete last line, and how much was dropped."""
        if self._held:
            self._line(self._held)
        if self._dropped:
            self._report()

    def _line(self, line: bytes) -> None:
        for start in range(0, len(line) or 1, LINE_BYTES):
            part = line[start : start + LINE_BYTES]
            self._budget -= len(part) + TAG_BYTES
            self._write(readable(part))

    def _report(self) -> None:
        what = f"{self._dropped} bytes that the reward function printed were dropped"
        self._write(f"({what}: more than {self._rate:.0f} a second)")
        self._dropped = 0


class PrintedReader(threading.Thread):
    """Reads a pipe until all writers have closed it; then closes it."""

    def __init__(self, pipe: int, share: float):
        super().__init__(name="reward-output", daemon=True)
        self._pipe, self._lines = pipe, LineSplitter(_destination(), share)

    def run(self) -> None:
        """Reads until the end of the pipe."""
        while data := os.read(self._pipe, 65_536):
            self._lines.feed(data)
        self._lines.end()
        os.close(self._pipe)


def _destination() -> Write:
    """The log file of the current role, kept because another may be current when the thread writes."""
    logs = log_of_this_process()
    if logs is None:
        return _to_standard_error
    role = logs.role
    return lambda text: logs.line(PRINTED, text, role=role)


def _to_standard_error(text: str) -> None:
    with suppress(OSError, ValueError):  # a full disk or a closed stream costs the line, never the run
        print(text, file=sys.stderr, flush=True)
