"""python -m hydraflow.logs RUN: merges the log files of a run by time; filters by role, rank or text, and
follows growing files.

In: `<run>/logs/`, which `system/role_logs.py` writes. Out: lines on standard output. Lines without a tag
belong to the line before them, and are shown or left out with it. Imports only the standard library, so it
starts at once. Left out on purpose: files of machines that do not share the run folder.
"""

from __future__ import annotations

import argparse
import heapq
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hydraflow.system.paths import expanded
from hydraflow.system.printing import make_printable, reader_may_leave
from hydraflow.system.role_logs import LEVELS, LINE
from hydraflow.system.whole_files import json_object
from hydraflow.tracking.endings import DONE, is_orderly
from hydraflow.tracking.run_lock import is_at_work

POLL_SECONDS = 0.2
QUIET_POLLS = 5
"""`--follow` stops after this many polls without a new line once the run has ended."""
ENDED = "summary.json"
"""The file that a run writes when it ends."""
FILE = re.compile(r"(.+)-(\d+)\.log(?:\.(\d+))?")
"""Role, rank, and number of the rotated file (0: the newest)."""


@dataclass(frozen=True)
class LogRecord:
    """One tagged line, with the untagged ones below it."""

    time: str
    level: str
    role: str
    rank: int
    text: str
    continues: bool = False
    """Whether it is more of the record before it: untagged lines that were written later."""

    def __str__(self) -> str:
        return f"{self.time} {self.level} {self.role}-{self.rank} {self.text}"


RecordFilter = Callable[[LogRecord], bool]


class LogParser:
    """Groups the lines of one file into records: a record is complete when the next one starts, or at
    `rest`."""

    def __init__(self, role: str, rank: int):
        self._role, self._rank = role, rank
        self._held: list[str] = []
        self._head = ("", "OUT")
        self._continues = False

    def feed(self, line: str) -> Iterator[LogRecord]:
        """Adds a line; returns the previous record if this line starts a new one."""
        found = LINE.fullmatch(line)
        if found and found[2] in LEVELS:
            yield from self.rest()
            self._head, self._held, self._continues = (found[1], found[2]), [found[5]], False
        else:
            self._held.append(line)

    def rest(self) -> Iterator[LogRecord]:
        """The pending lines as a record."""
        if self._held:
            yield LogRecord(*self._head, self._role, self._rank, "\n".join(self._held), self._continues)
        self._held, self._continues = [], True


def log_files(
    folder: Path, roles: Sequence[str] = (), ranks: Sequence[int] = ()
) -> dict[tuple[str, int], list[Path]]:
    """The files of each of these roles and ranks (empty: all), the oldest first."""
    found: dict[tuple[str, int], list[tuple[int, Path]]] = {}
    for match in map(FILE.fullmatch, os.listdir(folder) if folder.is_dir() else ()):
        if match and (not roles or match[1] in roles) and (not ranks or int(match[2]) in ranks):
            found.setdefault((match[1], int(match[2])), []).append((int(match[3] or 0), folder / match[0]))
    return {key: [path for _, path in sorted(files, reverse=True)] for key, files in sorted(found.items())}


def read(folder: Path, roles: Sequence[str], ranks: Sequence[int]) -> Iterator[LogRecord]:
    """The records of these roles and ranks (empty: all), by time; those of one file keep their order."""
    files = log_files(folder, roles, ranks).items()
    return heapq.merge(*(_records(key, paths) for key, paths in files), key=lambda record: record.time)


def _records(key: tuple[str, int], paths: Sequence[Path]) -> Iterator[LogRecord]:
    parser = LogParser(*key)
    for path in paths:
        # a missing file has been rotated since the folder was listed
        with suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            for line in file:
                yield from parser.feed(line.removesuffix("\n"))
    yield from parser.rest()


class LogFollower:
    """Reads files as they grow. A rotated file is read to its end, then its successor."""

    def __init__(self, folder: Path, roles: Sequence[str], ranks: Sequence[int]):
        self._folder, self._roles, self._ranks = folder, roles, ranks
        self._parsers: dict[tuple[str, int], LogParser] = {}
        self._read: dict[int, tuple[int, bytes]] = {}
        """Inode -> number of bytes read, and an unfinished last line."""

    def new(self, *, at_end: bool = False) -> list[LogRecord]:
        """The records since the last call, by time. at_end: nothing more will be written, so an unfinished
        line counts as one."""
        found = [
            record
            for key, paths in log_files(self._folder, self._roles, self._ranks).items()
            for record in self._new_records(key, paths, at_end)
        ]
        return sorted(found, key=lambda record: record.time)

    def _new_records(self, key: tuple[str, int], paths: Sequence[Path], at_end: bool) -> Iterator[LogRecord]:
        parser = self._parsers.setdefault(key, LogParser(*key))
        for path in paths:
            for line in self._new_lines(path, at_end):
                yield from parser.feed(line)
        yield from parser.rest()

    def _new_lines(self, path: Path, at_end: bool) -> list[str]:
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                inode = status.st_ino
                at, unfinished = self._read.get(inode, (0, b""))
                if status.st_size < at:  # the inode of a deleted file was reused for this one
                    at, unfinished = 0, b""
                file.seek(at)
                fresh = file.read()
        except FileNotFoundError:
            return []  # rotated since the folder was listed
        *lines, unfinished = (unfinished + fresh).split(b"\n")
        if at_end and unfinished:
            lines, unfinished = [*lines, unfinished], b""
        self._read[inode] = (at + len(fresh), unfinished)
        return [line.decode(errors="replace") for line in lines]


def record_filter(pattern: str | None, level: str | None) -> RecordFilter:
    """Shows records that match `--grep` and have at least the `--level`, and what continues them."""
    found = re.compile(pattern) if pattern is not None else None
    least = LEVELS[level.upper()] if level else 0
    shown: dict[tuple[str, int], bool] = {}

    def accepts(record: LogRecord) -> bool:
        source = record.role, record.rank
        matches = LEVELS[record.level] >= least and (found is None or found.search(str(record)) is not None)
        shown[source] = matches or (record.continues and shown.get(source, False))
        return shown[source]

    return accepts


def show(folder: Path, options: argparse.Namespace, accepts: RecordFilter) -> None:
    """Prints the existing lines, and with `--follow` new ones until the run has ended."""
    follower = LogFollower(folder, options.role, options.rank)
    existing = follower.new() if options.follow else read(folder, options.role, options.rank)
    records = filter(accepts, existing)
    for record in deque(records, min(options.lines, sys.maxsize)) if options.lines is not None else records:
        print(record, flush=options.follow)
    quiet = 0
    while options.follow and (quiet < QUIET_POLLS or not has_ended(folder.parent)):
        time.sleep(POLL_SECONDS)
        fresh = follower.new()
        quiet = 0 if fresh else quiet + 1
        for record in filter(accepts, fresh):
            print(record, flush=True)
    for record in filter(accepts, follower.new(at_end=True) if options.follow else ()):
        print(record, flush=True)


def has_ended(run: Path) -> bool:
    """Whether the run has ended: it finished or was asked to end, or its process is gone.

    While the process lives, a failure may be followed by a restart (`trainer.max_restarts`). If it is on
    another machine, any summary.json means that the run has ended.
    """
    why = str((json_object(run / ENDED) or {}).get("why_it_ended", ""))
    if why == DONE or is_orderly(why):
        return True
    lives = is_at_work(run)
    return (run / ENDED).exists() if lives is None else not lives


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m hydraflow.logs", description="The log lines of a run, of all roles and ranks."
    )
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="run folder")
    roles = "controller, actor, rollout, reward, ...; may be repeated"
    add("--role", action="append", default=[], help=roles)
    add("--rank", action="append", default=[], type=int, help="may be repeated")
    levels = [level.lower() for level in LEVELS if level != "OUT"]
    add("--level", choices=levels, help="lowest level that is shown")
    pattern = "regular expression to search for in each record, its tag and all its lines included"
    add("--grep", metavar="PATTERN", help=pattern)
    add("-n", "--lines", type=int, metavar="N", help="the last N records only")
    until = "print new lines as they appear, until the run ends or Ctrl-C"
    add("-f", "--follow", action="store_true", help=until)
    return parser.parse_args(argv)


def _problem(options: argparse.Namespace, folder: Path) -> str:
    """The error in the options, with a remedy; empty if there is none. With `--follow`, a missing role is not
    an error, since it may still start."""
    if not os.path.isdir(folder):
        remedy = "the folder of a run, such as runs/ppo-20260101-120000"
        return f"{options.run}: no logs/ in it\n      -> {remedy}"
    if options.lines is not None and options.lines < 0:
        return f"--lines={options.lines}: must be at least 0\n      -> --lines 100"
    there = log_files(folder)
    roles, ranks = list(dict.fromkeys(role for role, _ in there)), {rank for _, rank in there}
    absent = [f"--role={role}: no such role in this run" for role in options.role if role not in roles]
    remedy = f"--role {' or --role '.join(roles)}"
    if not absent:
        absent = [f"--rank={rank}: no such rank in this run" for rank in options.rank if rank not in ranks]
        remedy = f"--rank 0 to --rank {max(ranks, default=0)}"
    if absent:
        if not options.follow or has_ended(folder.parent):
            return f"{absent[0]}\n      -> {remedy if there else 'no line has been written yet'}"
        print(f"{absent[0]} yet; waiting for it", file=sys.stderr)
    try:
        re.compile(options.grep or "")
    except (re.error, OverflowError, RecursionError) as error:
        remedy = f"--grep '{re.escape(options.grep)}'"
        return f"--grep={options.grep}: not a regular expression: {error}\n      -> {remedy}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the log of a run; returns the exit code."""
    make_printable()
    options = _arguments(argv)
    folder = expanded(options.run) / "logs"
    if problem := _problem(options, folder):
        print(problem, file=sys.stderr)
        return 2
    try:
        with reader_may_leave():
            show(folder, options, record_filter(options.grep, options.level))
    except KeyboardInterrupt:
        return 130
    except PermissionError as error:
        print(f"{error.filename}: cannot be read ({error.strerror})", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
