"""Data files: whether they exist, can be read, have the columns that training and scoring need, and have
prompts within the configured limits and the model's positions.

In: the files that the configuration names, the tokenizer. Out: findings, one per file and mistake.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from hydraflow.checkup import sampling
from hydraflow.checkup.context import FILE_KEYS, CheckContext
from hydraflow.checkup.finding import CheckSkipped, Finding, note, of_problem, ok, problem, warning
from hydraflow.data.chat import as_messages, tokenise_chats
from hydraflow.data.config import DataConfig, PromptConfig
from hydraflow.data.files import FileRecord
from hydraflow.errors import ConfigError
from hydraflow.models.loading import Context, context_of

SAMPLE, TOKENISED = 64, 512
"""Rows sampled from each file, and prompts tokenised for each key (all its files together)."""
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
    """Raises CheckSkipped if rows have no prompts, which `check_data` reports."""
    if any(column not in record.values for record in records):
        raise CheckSkipped(f"rows have no column {column}: see data files")


def row_problems(records: Sequence[FileRecord], data: DataConfig) -> list[str]:
    """What is wrong with rows of a file that has all needed columns."""
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
    """The override with the column that was probably meant; empty if no key names the column."""
    close = difflib.get_close_matches(name, table.columns, n=1)
    return f"{key}={close[0]}" if key and close else f"{key}=<one of its columns>" if key else ""


def _short(kind: str) -> str:
    return kind if len(kind) <= 60 else f"{kind[:57]}..."


def check_lengths(context: CheckContext) -> Iterator[Finding]:
    """Tokenises a sample of each data file, as training does with all rows."""
    if context.main_key is None:
        raise CheckSkipped(context.nothing_yet())
    data, tokenizer = context.config.data, context.tokenizer
    for key in FILE_KEYS:
        if not context.files(key):
            continue
        records = context.sample(key, TOKENISED)
        require_prompts(records, data.prompt_key)
        chats = [as_messages(record, data.prompt_key) for record in records]
        options = data.apply_chat_template_kwargs
        ids = tokenise_chats(tokenizer, chats, records, add_generation_prompt=True, template_kwargs=options)
        total = sum(sampling.look_at(path, key).rows for path in context.files(key))
        yield from judge_lengths(
            sorted(map(len, ids)), data, key=key, total=total, context=context_of(context.model_config)
        )


def judge_lengths(
    lengths: Sequence[int], data: PromptConfig, *, key: str, total: int, context: Context | None
) -> Iterator[Finding]:
    """`lengths`: tokens of each prompt in the sample, ascending. `total`: rows in the files. `context`: the
    model's."""
    limit, response = data.max_prompt_length, data.max_response_length
    longest, median = lengths[-1], lengths[len(lengths) // 2]
    whose = f"all {total} rows" if len(lengths) == total else f"a sample of {len(lengths)} of {total} rows"
    seen = f"{key}, {whose}: median {median} tokens, longest {longest}"
    over = sum(length > limit for length in lengths)
    kept = [min(length, limit) for length in lengths if length <= limit or not data.filter_overlong_prompts]
    if over:
        evidence = f"{seen}; {over} are longer than data.max_prompt_length={limit}"
        yield _overlong(evidence, over == len(lengths), longest, data)
    if context is not None and kept and kept[-1] + response > context.tokens:
        more, room = f"more than {context.limit}", context.tokens - kept[-1]
        too_long = f"data.max_prompt_length={context.tokens // 2}"
        shorter = f"data.max_response_length={room}" if room > 0 else too_long
        yield problem(f"{seen}; with data.max_response_length={response} that is {more}", shorter)
    elif not over:
        yield ok(f"{seen}; data.max_prompt_length={limit}")


def _overlong(evidence: str, all_of_them: bool, longest: int, data: PromptConfig) -> Finding:
    remedy = f"data.max_prompt_length={longest}"
    if data.filter_overlong_prompts:
        found = problem if all_of_them else note
        return found(f"{evidence}; they are left out", remedy)
    if data.truncation == "error":
        return problem(evidence, f"{remedy} or data.filter_overlong_prompts=true or data.truncation=left")
    lost = f"{evidence}; data.truncation={data.truncation} shortens them"
    return warning(lost, f"{remedy} or data.filter_overlong_prompts=true")
