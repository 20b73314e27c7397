"""Reads rows from Parquet and JSONL files, and writes them as Parquet.

In: one path or several. Out: records that know their file and row, for later errors. Left out on purpose:
downloads (a run reads local files only) and streaming (the prompts of a run fit into memory)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from hydraflow.errors import ConfigError, Problem
from hydraflow.system.paths import JSON_ENDINGS, PARQUET_ENDING, file_problems, listed
from hydraflow.system.whole_files import replacing

SHOWN_PROBLEMS = 5
PARQUET_ROWS = 1024
"""Rows of a Parquet file read at a time."""
DEEPEST = 100
"""Nesting limit of a row: rows are written as JSON and printed in messages, which fails for values nested
much deeper."""


@dataclass(frozen=True)
class FileRecord:
    """One row of a file, with its origin."""

    values: dict[str, Any]
    """Column name -> value, as plain Python objects."""
    file: Path
    row: int
    """Its number in the file, from 0."""

    def problem(self, rule: str, remedy: str = "") -> Problem:
        """A problem in this row, for a `ConfigError`."""
        return Problem(f"{self.file} row {self.row}", None, rule, remedy)


def read_records(
    files: str | Path | Sequence[str | Path] | None,
    *,
    key: str,
    columns: Mapping[str, str] | None = None,
    limit: int = -1,
) -> list[FileRecord]:
    """Rows of all `files` in order, the first `limit` of them (-1: all). `key` is the configuration key to
    name in errors. Raises `ConfigError` for a missing, unreadable or empty file and for a row in which one of
    `columns` (see `require_columns`) is absent or null."""
    records: list[FileRecord] = []
    for path in as_paths(files, key):
        if len(records) == limit:
            break
        records += _read_file(path, key, limit - len(records) if limit >= 0 else None)
    if not records:
        raise ConfigError.one(key, files, f"a limit of {limit} leaves no rows", "use -1 for all rows")
    require_columns(records, columns or {})
    return records


def as_paths(files: Any, key: str) -> list[Path]:
    """`files` as a list of paths that exist. Raises `ConfigError` naming `key` and every missing file."""
    if problems := file_problems(files, key):
        raise ConfigError(problems)
    return listed(files) or []


def require_columns(records: Sequence[FileRecord], columns: Mapping[str, str]) -> None:
    """Raises `ConfigError` naming file, row and column of the first rows that lack one of `columns`. These
    map a column's name to the configuration key that sets it, or to "" if the name is fixed."""
    problems: list[Problem] = []
    for record in records:
        if missing := [c for c in columns if record.values.get(c) is None]:
            there = ", ".join(filled(record)) or "none"
            rule = f"has no value in column {', '.join(missing)}; it has {there}"
            problems.append(record.problem(rule, _other_columns(missing, columns)))
    if len(problems) < len(records):  # the column is right
        problems = [replace(one, remedy="fill it in, or remove the row") for one in problems]
    if len(problems) == len(records) > 1 and len({problem.rule for problem in problems}) == 1:
        rule = f"{problems[0].rule}, like all {len(records)} rows"
        raise ConfigError([replace(problems[0], rule=rule)])
    raise_problems(problems)


def _other_columns(missing: Sequence[str], columns: Mapping[str, str]) -> str:
    """The remedy for rows without these columns."""
    named = " ".join(f"{columns[name]}=<one of its columns>" for name in missing if columns[name])
    fixed = ", ".join(name for name in missing if not columns[name])
    return " and ".join(filter(None, [named, fixed and f"write a column {fixed}"]))


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raises `ConfigError` with the first few problems and the number of the rest, if there are any."""
    if not problems:
        return
    shown = list(problems[:SHOWN_PROBLEMS])
    if len(problems) > SHOWN_PROBLEMS:
        shown.append(Problem("data", None, f"{len(problems) - SHOWN_PROBLEMS} more rows have this problem"))
    raise ConfigError(shown)


def filled(record: FileRecord) -> list[str]:
    """Names of the columns in which this row has a value."""
    return [name for name, value in record.values.items() if value is not None]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows with the same columns as Parquet, under a temporary name until the file is complete."""
    import pyarrow
    import pyarrow.parquet

    with replacing(path) as unfinished:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), unfinished)


def _read_file(path: Path, key: str, limit: int | None) -> list[FileRecord]:
    """The first `limit` rows; None: all."""
    readers = {PARQUET_ENDING: _parquet_rows, **dict.fromkeys(JSON_ENDINGS, _json_rows)}
    if path.suffix not in readers:
        rule = f"ends in {path.suffix or 'nothing'}; supported are {', '.join(readers)}"
        raise ConfigError.one(key, path, rule)
    rows = islice(readers[path.suffix](path, key, limit), limit)
    records = [FileRecord(values, path, row) for row, values in enumerate(rows)]
    if not records:
        raise ConfigError.one(key, path, "the file has no rows")
    return records


def _parquet_rows(path: Path, key: str, limit: int | None) -> Iterator[dict[str, Any]]:
    """Reads in small batches: as Python objects, rows may take ten thousand times their size in the file."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := sorted({name for name in names if names.count(name) > 1}):
                rule = f"has several columns with the name {twice[0]}"
                raise ConfigError.one(key, path, rule, "give each column a name of its own")
            for batch in file.iter_batches(batch_size=min(PARQUET_ROWS, limit or PARQUET_ROWS)):
                yield from batch.to_pylist(maps_as_pydicts="strict")
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, KeyError) as error:
        # the last three: values that Python cannot represent, a map with a key twice
        raise ConfigError.one(key, path, f"is not a readable Parquet file: {error}") from error


def _json_rows(path: Path, key: str, limit: int | None) -> Iterator[dict[str, Any]]:
    """One JSON object per line; blank lines are skipped."""
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield parse_line(path, key, number, line)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.one(key, path, f"cannot be read: {error}") from error


def parse_line(path: Path, key: str, number: int, line: str) -> dict[str, Any]:
    """The JSON object on a line of a file. Raises ConfigError naming the line if it is not an object, or one
    that later stages could not handle."""
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        rule = f"line {number} is not JSON: {error}"
        raise ConfigError.one(key, path, rule, "write one JSON object per line") from error
    except ValueError as error:  # Python parses no integer of more than 4300 digits
        rule = f"line {number} cannot be read: {error}"
        raise ConfigError.one(key, path, rule, "store long numbers as text") from error
    except RecursionError:
        raise _too_deep(path, key, number) from None
    # counting brackets is a cheap bound that spares nearly every row the walk
    if line.count("[") + line.count("{") > DEEPEST and depth(values) > DEEPEST:
        raise _too_deep(path, key, number)
    if not isinstance(values, dict):
        rule = f"line {number} is a JSON {type(values).__name__}, not an object"
        raise ConfigError.one(key, path, rule, "write one JSON object per line")
    return values


def _too_deep(path: Path, key: str, number: int) -> ConfigError:
    rule = f"line {number} is nested more than {DEEPEST} levels deep"
    return ConfigError.one(key, path, rule, "store deeply nested values as text")


def depth(values: Any) -> int:
    """Levels of lists and objects within each other.

    >>> depth([{"a": [1]}, 2])
    3
    """
    levels, level = 0, [values]
    while level := [one for one in level if isinstance(one, dict | list)]:
        levels += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return levels
