"""How many rows the data files hold, without reading them: from the footers of Parquet files, or the lines of
JSONL.

In: what `data.*_files` says. Out: `RowCount`. Files that are not on this machine are noted, not refused: a
plan may be made elsewhere. Left out on purpose: what is in the rows. Prompts that a tokenizer would find too
long are still counted, and the count says so.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydraflow.errors import Problem

JSON_ENDINGS = (".jsonl", ".json")


@dataclass(frozen=True)
class RowCount:
    """Number of rows in the files of one key, as far as it is known."""

    rows: int | None
    """None: not known, because a file is not on this machine or none was named."""
    at_most: bool = False
    """Whether rows may still be left out, once a tokenizer has counted their tokens."""
    missing: tuple[str, ...] = ()
    """Files that are not on this machine."""
    problems: tuple[Problem, ...] = ()
    """Files that are here and cannot be used."""

    def __str__(self) -> str:
        return "unknown" if self.rows is None else f"{'at most ' if self.at_most else ''}{self.rows}"


def count_rows(files: Any, *, key: str, limit: int = -1, filtered: bool = False) -> RowCount:
    """Rows of `files`, a path or a list of paths, of which the first `limit` are used (-1: all).

    `key` is named in problems. `filtered`: rows that are too long will be left out later, so that the count
    is an upper bound.
    """
    if files is None:
        return RowCount(None)
    names = [files] if isinstance(files, str) else files
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
        rule = "must be a Parquet or JSONL file, or a list of them"
        return RowCount(None, problems=(Problem(key, files, rule, f"{key}=/path/to/file.parquet"),))
    paths = {name: Path(name).expanduser() for name in names}
    missing = tuple(name for name, path in paths.items() if not path.exists())
    counted = [_count_file(paths[name], key) for name in names if name not in missing]
    problems = tuple(found for found in counted if isinstance(found, Problem))
    if missing or problems:
        return RowCount(None, missing=missing, problems=problems)
    rows = sum(found for found in counted if isinstance(found, int))
    return RowCount(rows if limit < 0 else min(rows, limit), at_most=filtered)


def missing_notes(key: str, count: RowCount) -> Iterator[str]:
    """Notes about files that are not on this machine."""
    for name in count.missing:
        yield (
            f"{key}: {name} is not on this machine, so its rows are not counted; a run would refuse to start"
        )


def _count_file(path: Path, key: str) -> int | Problem:
    if path.is_dir():
        return Problem(key, path, "is a folder, not a file")
    if path.suffix in JSON_ENDINGS:
        return _rows_or_problem(_lines(path), path, key)
    if path.suffix != ".parquet":
        return Problem(
            key, path, f"ends in {path.suffix or 'nothing'}; known are .parquet, {', '.join(JSON_ENDINGS)}"
        )
    return _rows_or_problem(_footer_rows(path), path, key)


def _rows_or_problem(rows: int | str, path: Path, key: str) -> int | Problem:
    if isinstance(rows, str):
        return Problem(key, path, rows)
    return rows or Problem(key, path, "the file has no rows")


def _lines(path: Path) -> int | str:
    try:
        with open(path, "rb") as file:
            filled = (line for line in file if line.strip())
            if (first := next(filled, None)) is None:
                return 0
            if not first.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
                return "its first line is not a JSON object; write one JSON object a line"
            return 1 + sum(1 for _ in filled)
    except OSError as error:
        return f"cannot be read: {error}"


def _footer_rows(path: Path) -> int | str:
    """Rows of a Parquet file, as its last few kilobytes say; else why they cannot be read."""
    import pyarrow  # here, because it takes a tenth of a second that most plans do not need
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(path).num_rows)
    except (pyarrow.ArrowException, OSError) as error:
        return f"is not a readable Parquet file: {error}"
