"""Looks into data files without reading all of them: number of rows, columns with their types, and rows from
all over the file.

In: a Parquet or JSONL file. Out: `DataFileInfo`, or a few `FileRecord`s. Raises ConfigError for what cannot
be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydraflow.data.files import FileRecord, parse_line
from hydraflow.errors import ConfigError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

PIECES = 8
"""Largest number of row groups sampled from a Parquet file."""
TYPED_LINES = 20
"""Number of lines from which the columns of a JSONL file are inferred."""


@dataclass(frozen=True)
class DataFileInfo:
    """Size and columns of a data file."""

    path: Path
    rows: int
    columns: dict[str, str]
    """Name -> type."""


def look_at(path: Path, key: str) -> DataFileInfo:
    """Rows and columns; `key` is the configuration key to name in errors."""
    if _is_parquet(path, key):
        file = _open(path, key)
        columns = {field.name: str(field.type) for field in file.schema_arrow}
        return DataFileInfo(path, file.metadata.num_rows, columns)
    rows, records = _of_lines(path, key, TYPED_LINES)
    types = {name: type(value).__name__ for record in records for name, value in record.values.items()}
    return DataFileInfo(path, rows, types)


def sample(path: Path, key: str, count: int) -> list[FileRecord]:
    """About `count` rows from all over the file, or all rows if there are fewer."""
    if not _is_parquet(path, key):
        return _of_lines(path, key, count)[1]
    file = _open(path, key)
    groups = spread(file.metadata.num_row_groups, min(PIECES, count))
    starts = [0]
    for group in range(file.metadata.num_row_groups):
        starts.append(starts[-1] + file.metadata.row_group(group).num_rows)
    each = -(-count // max(1, len(groups)))
    found = []
    for group in groups:
        rows = enumerate(_first_of(file, path, key, group, each), starts[group])
        found += [FileRecord(row, path, number) for number, row in rows]
    return found[:count]


def spread(total: int, count: int) -> Sequence[int]:
    """`count` numbers below `total` at equal distances, or all of them.

    >>> list(spread(10, 3)), list(spread(2, 3))
    ([0, 3, 6], [0, 1])
    """
    return range(total) if total <= count else [total * i // count for i in range(count)]


def _is_parquet(path: Path, key: str) -> bool:
    if path.suffix not in (".parquet", ".jsonl", ".json"):
        rule = f"ends in {path.suffix or 'nothing'}; known are .parquet, .jsonl, .json"
        raise ConfigError.one(key, path, rule)
    return path.suffix == ".parquet"


def _open(path: Path, key: str) -> ParquetFile:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        rule = f"is not a readable Parquet file: {error}"
        raise ConfigError.one(key, path, rule, "write it again, or copy it again") from error
    if file.metadata.num_rows == 0:
        raise ConfigError.one(key, path, "the file has no rows")
    return file


def _first_of(file: ParquetFile, path: Path, key: str, group: int, count: int) -> list[dict[str, Any]]:
    """The first rows of a row group."""
    import pyarrow

    try:
        batch = next(file.iter_batches(batch_size=count, row_groups=[group]), None)
        return batch.to_pylist() if batch is not None else []
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        rule = f"row group {group} cannot be read: {error}"
        raise ConfigError.one(key, path, rule, "write it again, or copy it again") from error


def _of_lines(path: Path, key: str, count: int) -> tuple[int, list[FileRecord]]:
    """Number of lines that are not blank, and the rows in `count` of them."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.one(key, path, f"cannot be read: {error}") from error
    if not lines:
        raise ConfigError.one(key, path, "the file has no rows")
    chosen = spread(len(lines), count)
    return len(lines), [FileRecord(parse_line(path, key, *lines[row]), path, row) for row in chosen]
