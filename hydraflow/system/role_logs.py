"""Log files of a run: one for each role and rank, `<run>/logs/actor-1.log`, with a tag on every line, and
rotation.

In: log records, printed text, and output of native libraries; and the role whose method is running. Out:
lines such as

    2026-11-21T08:47:24.123Z WARNING actor-1 hydraflow.workers.skipping: step 12: optimizer step 1 is skipped

in UTC, so that the files of several machines can be merged. A line without a tag continues the line before:
stack traces, and output of C code. A process with several roles has one file per role, and writes to that of
the role whose method is running. Left out on purpose: reading the files (`logs.py`), and the controller's
console (`logging_setup.py`).
"""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hydraflow.dispatch.config import LogConfig

CONTROLLER = "controller"
"""Role name of the process that runs the loop; its rank is 0."""
PRINTED = "OUT"
"""Level of printed lines; counts as INFO."""
LEVELS = {"DEBUG": 10, "INFO": 20, PRINTED: 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) ([A-Z]+) (\S+)-(\d+) (.*)")
"""Time, level, role, rank, text."""
STANDARD_OUTPUT, STANDARD_ERROR = 1, 2
"""File descriptors."""
STACKS = signal.SIGUSR2
"""On this signal a process writes the stacks of its threads to standard error; batch systems use SIGUSR1."""
OURS = "hydraflow"
"""Logger of the package: with level debug, other libraries stay at info."""


@dataclass(frozen=True)
class LogSettings:
    """Log settings, passed to every process of a run."""

    folder: str
    """The folder of the log files; created if missing."""
    log: LogConfig = field(default_factory=LogConfig)
    """Levels and rotation. Console lines go to the process's original standard error, which Ray shows."""


def apply_level(level: str) -> None:
    """Sets this process's log level; loggers of other libraries never go below info."""
    number = LEVELS[level.upper()]
    logging.getLogger().setLevel(max(number, logging.INFO))
    logging.getLogger(OURS).setLevel(number)


def write_stacks_when_asked() -> None:
    """Makes the signal STACKS write the stacks of all threads of this process, whatever they are doing."""
    faulthandler.register(STACKS, file=STANDARD_ERROR, all_threads=True)


def stamp(seconds: float) -> str:
    """A Unix time in the format of the log lines.

    >>> stamp(0.25)
    '1970-01-01T00:00:00.250Z'
    """
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(seconds % 1 * 1000):03d}Z"


class RoleFile:
    """One log file: append and rotate."""

    def __init__(self, path: Path, max_bytes: int, keep: int):
        self.path, self._max_bytes, self._keep = path, max_bytes, keep
        self.number = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, line: str) -> bool:
        """Appends a line; True if the file was rotated first, which changes `number`."""
        rotated = False
        if os.fstat(self.number).st_size >= self._max_bytes:
            with suppress(OSError):  # no room for another file: this one grows
                self._rotate()
                rotated = True
        os.write(self.number, f"{line}\n".encode(errors="replace"))
        return rotated

    def close(self) -> None:
        os.close(self.number)

    def _rotate(self) -> None:
        """.log becomes .log.1, .log.1 becomes .log.2, and so on; the oldest is deleted.

        The new file is opened first, under another name: if that fails (OSError), nothing has moved, and
        `number` is unchanged.
        """
        fresh = self.path.with_name(f".{self.path.name}.new")
        number = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            for older in range(self._keep, 0, -1):
                newer = self.path.with_name(f"{self.path.name}.{older - 1}") if older > 1 else self.path
                if newer.exists():
                    newer.replace(self.path.with_name(f"{self.path.name}.{older}"))
            fresh.replace(self.path)
        except OSError:
            os.close(number)
            raise
        os.close(self.number)
        self.number = number


class RoleLogs(logging.Handler):
    """A process's log files, one per role, created when the role first writes.

    A handler for Python's logging; with `capture`, everything else that the process writes to its standard
    output and error is logged, too. Raises OSError if the folder cannot be created or written.
    """

    def __init__(self, settings: LogSettings, rank: int, role: str):
        super().__init__()
        self.log, self.rank, self.role = settings.log, rank, role
        self._folder = Path(settings.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, RoleFile] = {}
        self._captures = False
        self._console: int | None = None
        self._threshold = LEVELS[self.log.level.upper()]
        self._guard = threading.RLock()
        self._file()

    def capture(self, *, below_python: bool = True) -> None:
        """Redirects this process's standard output and error to the log, the output of a crash included.

        below_python: also redirects the file descriptors, past Python's sys.stdout and sys.stderr.
        """
        if self.log.console is not None:
            self._console = os.dup(STANDARD_ERROR)
        self._captures = below_python
        sys.stdout = PrintedLines(self, STANDARD_OUTPUT)  # type: ignore[assignment]
        sys.stderr = PrintedLines(self, STANDARD_ERROR)  # type: ignore[assignment]
        self._point(self._file())

    @contextmanager
    def of(self, role: str) -> Iterator[None]:
        """Lines that are written within the block belong to this role."""
        before = self.role
        self._switch(role)
        try:
            yield
        finally:
            self._switch(before)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = f"{record.name}: {record.getMessage()}"
        except Exception:  # as logging's own handlers do: a wrong log call does not fail the caller
            self.handleError(record)
            return
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        self.line(record.levelname if record.levelname in LEVELS else "INFO", text, record.created)

    def line(self, level: str, text: str, at: float | None = None, *, role: str | None = None) -> None:
        """Writes one tagged line, which may be followed by untagged ones. If the disk is full, the line is
        lost, but the run continues.

        `role`: the line's role; None: the role whose method is running.
        """
        if LEVELS[level] < self._threshold:
            return
        with suppress(OSError), self._guard:
            role, since = role or self.role, stamp(time.time() if at is None else at)
            tagged = f"{since} {level} {role}-{self.rank} {_untagged(text)}"
            file = self._file(role)
            if file.write(tagged) and role == self.role:
                self._point(file)
            if self._console is not None and LEVELS[level] >= LEVELS[(self.log.console or "").upper()]:
                os.write(self._console, f"{tagged}\n".encode(errors="replace"))

    def close(self) -> None:
        """Closes the files; only for a process that outlives them."""
        with self._guard:
            for file in self._files.values():
                file.close()
            self._files = {}
        super().close()

    def _file(self, role: str | None = None) -> RoleFile:
        role = role or self.role
        if role not in self._files:
            path = self._folder / f"{role}-{self.rank}.log"
            self._files[role] = RoleFile(path, int(self.log.max_megabytes * 2**20), self.log.keep)
        return self._files[role]

    def _switch(self, role: str) -> None:
        with self._guard:
            if role == self.role:
                return
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, PrintedLines):
                    stream.end_line()
            self.role = role
            self._point(self._file())

    def _point(self, file: RoleFile) -> None:
        """Makes the process's descriptors 1 and 2 lead to the file, if they are captured."""
        if not self._captures:
            return
        for number in (STANDARD_OUTPUT, STANDARD_ERROR):
            os.dup2(file.number, number)


def _untagged(text: str) -> str:
    """Indents continuation lines that look like tagged ones by a space."""
    first, *more = text.split("\n")
    return "\n".join([first, *(f" {line}" if LINE.match(line) else line for line in more)])


def log_of_this_process() -> RoleLogs | None:
    """The installed `RoleLogs` handler, if there is one."""
    return next((handler for handler in logging.getLogger().handlers if isinstance(handler, RoleLogs)), None)


class PrintedLines(io.TextIOBase):
    """Replaces sys.stdout or sys.stderr: each complete line gets a tag; of a line that is overwritten (a
    progress bar), only the last state is logged."""

    def __init__(self, logs: RoleLogs, number: int):
        self._logs, self._number, self._held = logs, number, ""

    def write(self, text: str) -> int:
        """Buffers text; a line is written when it ends."""
        *lines, self._held = (self._held + text).split("\n")
        self._held = self._held.rsplit("\r", 1)[-1] if not self._held.endswith("\r") else self._held
        for line in lines:
            self._logs.line(PRINTED, line.rstrip("\r").rsplit("\r", 1)[-1])
        return len(text)

    def end_line(self) -> None:
        """Writes an unfinished line."""
        held, self._held = self._held.strip("\r"), ""
        if held:
            self._logs.line(PRINTED, held.rsplit("\r", 1)[-1])

    def fileno(self) -> int:
        return self._number

    @property
    def buffer(self) -> io.RawIOBase:
        """The binary stream, which bypasses the tags."""
        return io.FileIO(self._number, "wb", closefd=False)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False  # also once it is closed, when the base class raises

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"
