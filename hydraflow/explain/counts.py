"""Counts the rows of data files without parsing them: by the footers of Parquet files, or the lines of JSONL.

In: the value of `data.*_files`. Out: `RowCount`. Files that are not on this machine are noted, not refused:
the plan may be for another machine. Left out on purpose: what is in the rows. Prompts that are too long are
counted, because only a tokenizer can tell; the count says that it is an upper bound.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydraflow.errors import Problem
from hydraflow.system.paths import (
    DATA_ENDINGS,
    JSON_ENDINGS,
    PARQUET_ENDING,
    file_problems,
    listed,
    no_file,
)


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

    `key` is named in problems. `filtered`: rows that are too long will be left out later, so the count is an
    upper bound.
    """
    if files is None:
        return RowCount(None)
    paths = listed(files)
    if paths is None:
        return RowCount(None, problems=tuple(file_problems(files, key)))
    names = [files] if isinstance(files, str) else files
    missing = tuple(name for name, path in zip(names, paths) if not os.path.exists(path))
    counted = [_count_file(path, key) for path in paths if os.path.exists(path)]
    problems = tuple(found for found in counted if isinstance(found, Problem))
    if missing or problems:
        return RowCount(None, missing=missing, problems=problems)
    rows = sum(found for found in counted if isinstance(found, int))
    return RowCount(rows if limit < 0 else min(rows, limit), at_most=filtered)


def notes_on(key: str, count: RowCount, longest: int) -> Iterator[str]:
    """Notes about files that are not on this machine, and counts that are upper bounds. `longest`: the limit
    on a prompt's tokens."""
    for name in count.missing:
        uncounted = "so its rows are not counted; a run would refuse to start"
        yield f"{key}: {name} is not on this machine, {uncounted}"
    if count.at_most:
        longer = f"those with more than data.max_prompt_length={longest} tokens are left out"
        yield f"{key}: {count} prompts, an upper bound: {longer}, and only a tokenizer knows how many"


def _count_file(path: Path, key: str) -> int | Problem:
    if path.is_dir():
        return no_file(path, key)
    rows: int | str
    if path.suffix in JSON_ENDINGS:
        rows = _lines(path)
    elif path.suffix == PARQUET_ENDING:
        rows = _footer_rows(path)
    else:
        rows = f"ends in {path.suffix or 'nothing'}; known are {', '.join(DATA_ENDINGS)}"
    if isinstance(rows, str):
        return Problem(key, path, rows)
    return rows or Problem(key, path, "the file has no rows")


def _lines(path: Path) -> int | str:
    """Rows of a JSONL file, or why it cannot be used."""
    try:
        with open(path, "rb") as file:
            filled = (line for line in file if line.strip())
            if (first := next(filled, None)) is None:
                return 0
            if not first.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
                return "its first line is not a JSON object; write one JSON object per line"
            return 1 + sum(1 for _ in filled)
    except OSError as error:
        return f"cannot be read: {error}"


def _footer_rows(path: Path) -> int | str:
    """Rows of a Parquet file according to its footer, or why that cannot be read."""
    import pyarrow  # here, because it takes a tenth of a second that most plans do not need
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(path).num_rows)
    except (pyarrow.ArrowException, OSError) as error:
        return f"is not a readable Parquet file: {error}"
