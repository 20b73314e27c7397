"""Prompts for reinforcement learning, validation and generation, tokenised once before training starts.

In: files with a column of chat messages (or strings) and the columns that scoring needs. Out: `DataProto` of
ragged `prompts` and row objects. One file may mix several data sources. Left out on purpose: loader processes
and prefetching; a batch is a gather from memory and takes microseconds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hydraflow.data.chat import Messages, as_messages, tokenise_chats
from hydraflow.data.config import DataConfig, PromptConfig
from hydraflow.data.files import FileRecord, raise_problems, read_records
from hydraflow.errors import ConfigError
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.wire import as_objects

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class PromptDataset:
    """Tokenised prompts and their row objects.

    Row objects: `uid` (str, row number over all files; unaffected by filtering),
    `extra_info`, `raw_prompt` (the messages). Prompts of a `DataConfig` will be scored: they also have
    `data_source` and `reward_model` ({"style", "ground_truth"}), and files without those columns are refused.

    Raises `ConfigError` for unusable files, rows without a needed column and overlong prompts under
    truncation=error.
    """

    def __init__(
        self,
        config: PromptConfig,
        files: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        key: str = "data.train_files",
        max_samples: int = -1,
    ):
        records, chats = read_prompts(config, files, key=key, max_samples=max_samples)
        options = config.apply_chat_template_kwargs
        ids = tokenise_chats(tokenizer, chats, records, add_generation_prompt=True, template_kwargs=options)
        ids = _limit_lengths(ids, records, config)
        kept = [i for i, tokens in enumerate(ids) if len(tokens) <= config.max_prompt_length]
        _report_filtered(len(ids) - len(kept), len(ids), config, key)
        self.records: list[FileRecord] = [records[i] for i in kept]
        """The source record of each prompt, with all of its columns."""
        self._prompts = [torch.tensor(ids[i], dtype=torch.int64) for i in kept]
        self._objects = _row_objects(records, chats, kept, _source_key(config))

    def __len__(self) -> int:
        return len(self._prompts)

    def batch(self, rows: Sequence[int] | np.ndarray) -> DataProto:
        """The prompts of `rows`, in that order: ragged `prompts` (B, P) int64 and the row objects."""
        index = np.asarray(rows, dtype=np.int64)
        prompts = ragged.from_rows([self._prompts[i] for i in index.tolist()])
        return DataProto.from_dict(
            tensors={"prompts": prompts},
            non_tensors={k: column[index] for k, column in self._objects.items()},
        )

    @cached_property
    def longest(self) -> dict[str | None, int]:
        """Tokens of the longest prompt of each data source; of None where prompts have none."""
        sources = self._objects.get("data_source", [None] * len(self))
        found: dict[str | None, int] = {}
        for source, prompt in zip(sources, self._prompts, strict=True):
            found[source] = max(found.get(source, 0), len(prompt))
        return found

    def data_sources(self) -> list[str]:
        """The distinct data sources, sorted."""
        return sorted(set(self._objects["data_source"].tolist()))


def read_prompts(
    config: PromptConfig, files: Any, *, key: str, max_samples: int
) -> tuple[list[FileRecord], list[Messages]]:
    """Rows and their messages, not tokenised yet. Raises ConfigError for unusable files and rows without a
    needed column."""
    source_key = _source_key(config)
    needed = {config.prompt_key: "data.prompt_key"}
    if source_key:
        needed |= {source_key: "data.reward_fn_key", "reward_model": ""}
    records = read_records(files, key=key, columns=needed, limit=max_samples)
    if source_key:
        _require_ground_truth(records)
    return records, [as_messages(record, config.prompt_key) for record in records]


def _source_key(config: PromptConfig) -> str | None:
    """The column with the data source; None: these prompts are not scored."""
    return config.reward_fn_key if isinstance(config, DataConfig) else None


def _require_ground_truth(records: Sequence[FileRecord]) -> None:
    lacking, rule = [], 'column reward_model must hold {"style": ..., "ground_truth": ...}'
    for record in records:
        model = record.values["reward_model"]
        if not isinstance(model, dict) or model.get("ground_truth") is None:
            lacking.append(record.problem(rule))
    raise_problems(lacking)


def _limit_lengths(
    ids: list[list[int]], records: Sequence[FileRecord], config: PromptConfig
) -> list[list[int]]:
    """Truncates overlong prompts, or raises for them; filter_overlong_prompts leaves them unchanged."""
    limit = config.max_prompt_length
    sizes = [(len(tokens), record) for tokens, record in zip(ids, records, strict=True)]
    raise_problems([r.problem("the chat template renders it to no tokens") for size, r in sizes if not size])
    if config.filter_overlong_prompts:
        return ids
    if config.truncation == "error":
        whole = f"data.max_prompt_length={max(map(len, ids))}"
        remedy = f"{whole} or data.filter_overlong_prompts=true or data.truncation=left"
        rule = f"tokens, more than data.max_prompt_length={limit}"
        long = [(size, record) for size, record in sizes if size > limit]
        raise_problems([r.problem(f"the prompt has {size} {rule}", remedy) for size, r in long])
    return [truncate(tokens, limit, config.truncation) for tokens in ids]


def truncate(tokens: list[int], limit: int, side: str) -> list[int]:
    """At most `limit` tokens; `side` (left, right or middle) is the part that is cut.

    >>> [truncate([1, 2, 3, 4, 5], 3, side) for side in ("left", "right", "middle")]
    [[3, 4, 5], [1, 2, 3], [1, 4, 5]]
    """
    if len(tokens) <= limit:
        return tokens
    head = {"left": 0, "right": limit, "middle": limit // 2}[side]
    return tokens[:head] + tokens[len(tokens) - (limit - head) :]


def _report_filtered(dropped: int, rows: int, config: PromptConfig, key: str) -> None:
    if dropped == rows:
        rule = f"all {rows} prompts are longer than data.max_prompt_length={config.max_prompt_length}"
        raise ConfigError.one(key, None, rule, "raise data.max_prompt_length")
    if dropped:
        longer = f"with more than {config.max_prompt_length} tokens"
        logger.warning("%s: dropped %d of %d prompts %s", key, dropped, rows, longer)


def _row_objects(
    records: Sequence[FileRecord], chats: Sequence[Any], kept: Sequence[int], source_key: str | None
) -> dict[str, np.ndarray]:
    values = [records[i].values for i in kept]
    objects: dict[str, list[Any]] = {
        "uid": [str(i) for i in kept],
        "extra_info": [row.get("extra_info") or {} for row in values],
        "raw_prompt": [chats[i] for i in kept],
    }
    if source_key:
        objects["data_source"] = [str(row[source_key]) for row in values]
        objects["reward_model"] = [row["reward_model"] for row in values]
    _require_json([records[i] for i in kept], objects)
    return {name: as_objects(column) for name, column in objects.items()}


def _require_json(records: Sequence[FileRecord], objects: dict[str, list[Any]]) -> None:
    """Row objects travel as JSON; values that JSON cannot hold are reported here, with their row."""
    problems = []
    for name, values in objects.items():
        for record, value in zip(records, values, strict=True):
            try:
                json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                rule = f"{name} cannot be written as JSON: {error}"
                problems.append(record.problem(rule, "store it as text or numbers"))
    raise_problems(problems)
