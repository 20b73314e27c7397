"""Data files and their schema: are they there, can they be read, do the first rows hold what training and
scoring need?

In: the files that the configuration names. Out: findings, one per file and mistake.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from hydraflow.checkup import sampling
from hydraflow.checkup.context import FILE_KEYS, CheckContext
from hydraflow.checkup.finding import CheckSkipped, Finding, of_problem, ok, problem
from hydraflow.data.chat import as_messages
from hydraflow.data.config import DataConfig
from hydraflow.data.files import FileRecord
from hydraflow.errors import ConfigError

SAMPLE = 64
SHOWN = 3
REWARD_COLUMN = "reward_model"


def check_data(context: CheckContext) -> Iterator[Finding]:
    """Each file by itself; a broken one does not hide the others."""
    if context.main_key is None:
        raise CheckSkipped(context.nothing_yet())
    for key in FILE_KEYS:
        try:
            tables = [sampling.look_at(path, key) for path in context.files(key)]
        except ConfigError as error:
            yield from map(of_problem, error.problems)
            continue
        for table in tables:
            yield from _check_table(table, key, context)


def _check_table(table: sampling.DataFileInfo, key: str, context: CheckContext) -> Iterator[Finding]:
    data = context.config.data
    wanted = {data.prompt_key: "data.prompt_key", data.reward_fn_key: "data.reward_fn_key", REWARD_COLUMN: ""}
    missing = [name for name in wanted if name not in table.columns]
    for name in missing:
        remedy = _other_column(name, wanted[name], table) or f"write a column {name}"
        yield problem(f"{table.path} has no column {name}; it has {', '.join(table.columns)}", remedy)
    if missing:
        return
    wrong = row_problems(sampling.sample(table.path, key, SAMPLE), data)
    for text in wrong[:SHOWN]:
        yield problem(text, "correct the rows")
    if not wrong:
        types = ", ".join(f"{name}: {_short(table.columns[name])}" for name in wanted)
        yield ok(f"{table.path}: {table.rows} rows; {types}")


def require_prompts(records: Sequence[FileRecord], column: str) -> None:
    """Skip where rows have no prompts: `check_data` reports that."""
    if any(column not in record.values for record in records):
        raise CheckSkipped(f"rows have no column {column}: see data files")


def row_problems(records: Sequence[FileRecord], data: DataConfig) -> list[str]:
    """What is wrong with rows whose file has the columns that are needed."""
    found, needed = [], (data.prompt_key, data.reward_fn_key, REWARD_COLUMN)
    for record in records:
        if empty := [name for name in needed if record.values.get(name) is None]:
            found.append(str(record.problem(f"has no value in column {', '.join(empty)}")))
            continue
        try:
            as_messages(record, data.prompt_key)
        except ConfigError as error:
            found += [str(each) for each in error.problems]
        truth = record.values[REWARD_COLUMN]
        if not isinstance(truth, dict) or truth.get("ground_truth") is None:
            rule = f'must hold {{"style": ..., "ground_truth": ...}}, not {str(truth)[:60]}'
            found.append(str(record.problem(f"column {REWARD_COLUMN} {rule}")))
    return found


def _other_column(name: str, key: str, table: sampling.DataFileInfo) -> str:
    """The override that names the column that was probably meant."""
    close = difflib.get_close_matches(name, table.columns, n=1)
    return f"{key}={close[0]}" if key and close else f"{key}=<one of its columns>" if key else ""


def _short(kind: str) -> str:
    return kind if len(kind) <= 60 else f"{kind[:57]}..."
