"""Preference pairs: two responses to one prompt, one of them preferred.

In: files with the columns `prompt`, `chosen` and `rejected`, or with two complete conversations. Out: a
`DataProto` with two adjacent rows per pair, the preferred one first, in the engine's columns. Left out on
purpose: how the assistant's tokens are found (`conversations.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hydraflow.data.chat import Messages, as_messages
from hydraflow.data.config import GradedPairsConfig, PairsConfig
from hydraflow.data.conversations import (
    Conversation,
    TrainedRow,
    columns_of,
    require_turns,
    special_ids,
    tokenised,
    truncated,
)
from hydraflow.data.files import FileRecord, raise_problems, read_records, require_columns
from hydraflow.data.turns import END_OF_REASONING
from hydraflow.errors import ConfigError
from hydraflow.protocol.batch import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WITHIN_A_TURN = {"<think>", END_OF_REASONING, "<|channel|>", "<|message|>"}
"""Control tokens of some models that do not end a turn; gpt-oss opens one with the last two."""
_SAME = "chosen and rejected are the same"
_LOST = {
    "left": "truncated on the left to data.max_length={}, a response would lose its beginning",
    "right": f"{_SAME} once they are truncated to data.max_length={{}}",
}
"""Why a pair cannot be truncated, by side."""


class PairDataset:
    """Tokenised pairs. Raises `ConfigError` for unusable files, for rows that lack a required column, have
    two equal responses or are overlong under truncation=error, and as `conversations.py` does."""

    def __init__(
        self,
        config: PairsConfig,
        files: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        key: str = "data.train_files",
        max_samples: int = -1,
    ):
        records, pairs = read_pairs(config, files, key=key, max_samples=max_samples)
        chosen, rejected = (
            tokenised(tokenizer, [pair[side] for pair in pairs], records, config) for side in (0, 1)
        )
        ended = partial(_ended, tokenizer, special_ids(tokenizer))
        both = [
            _only_what_differs(*map(ended, pair, chats))
            for pair, chats in zip(zip(chosen, rejected, strict=True), pairs, strict=True)
        ]
        raise_problems([r.problem(_SAME) for r, pair in zip(records, both, strict=True) if pair is None])
        cut = [_cut(pair, config) for pair in both if pair is not None]
        lost = _LOST.get(config.truncation, _SAME).format(config.max_length), "a larger data.max_length"
        raise_problems([r.problem(*lost) for r, pair in zip(records, cut, strict=True) if pair is None])
        self._pairs = [[self._row(one) for one in pair] for pair in cut if pair is not None]
        self._margins = _margins(config, records)

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max((row.tokens for pair in self._pairs for row in pair), default=0)

    def batch(self, rows: Sequence[int] | np.ndarray) -> DataProto:
        """The pairs of `rows`, two rows each, the preferred one first: ragged int64 `prompts` (2B, P),
        `responses` (2B, R) and `response_mask`; `group` (2B,), the index of the pair; and, if the rows have
        margins, `margin` (2B,) float32."""
        numbers = np.asarray(rows, dtype=np.int64).tolist()
        picked = [row for number in numbers for row in self._pairs[number]]
        columns = columns_of(picked) | {"group": torch.arange(len(numbers)).repeat_interleave(2)}
        if self._margins is not None:
            margins = torch.tensor([self._margins[number] for number in numbers])
            columns["margin"] = margins.repeat_interleave(2)
        return DataProto.from_dict(tensors=columns)

    def _row(self, conversation: Conversation) -> TrainedRow:
        return TrainedRow.of(conversation)


class ScoredPairDataset(PairDataset):
    """Pairs for a reward model, whose score is its value after the last token: responses get one extra token
    that marks this position and is never fed to the model."""

    @property
    def longest(self) -> int:
        return super().longest - 1

    def _row(self, conversation: Conversation) -> TrainedRow:
        row = super()._row(conversation)
        return TrainedRow(row.prompt, *ending(row.response))


def ending(response: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A response (R,) with one extra token at its end, and the mask (R + 1,) that selects it. Values are
    those before a token, so the extra token's is the value after the whole response.

    >>> ending(torch.tensor([7, 8]))
    (tensor([7, 8, 0]), tensor([0, 0, 1]))
    """
    longer = torch.cat([response, response.new_zeros(1)])
    mask = torch.zeros_like(longer)
    mask[-1] = 1
    return longer, mask


def read_pairs(
    config: PairsConfig, files: Any, *, key: str, max_samples: int
) -> tuple[list[FileRecord], list[tuple[Messages, Messages]]]:
    """Rows and their two conversations, the preferred one first, not tokenised yet. Raises ConfigError for
    unusable files and for rows that are not pairs."""
    columns = {config.chosen_key: "data.chosen_key", config.rejected_key: "data.rejected_key"}
    records = read_records(files, key=key, columns=columns, limit=max_samples)
    texts = [record for record in records if isinstance(record.values[config.chosen_key], str)]
    require_columns(texts, {config.prompt_key: "data.prompt_key"})
    pairs = [(_chat(r, config.chosen_key, config), _chat(r, config.rejected_key, config)) for r in records]
    for side in (0, 1):
        require_turns(records, [pair[side] for pair in pairs])
    rule = "its conversations must end with the assistant's message"
    ends = [{chat[-1]["role"] for chat in pair} for pair in pairs]
    raise_problems(
        [r.problem(rule) for r, roles in zip(records, ends, strict=True) if roles != {"assistant"}]
    )
    return records, pairs


def _chat(record: FileRecord, column: str, config: PairsConfig) -> Messages:
    """The prompt, if the row has one, and the response of a column."""
    content = record.values[column]
    is_text = isinstance(content, str)
    response = [{"role": "assistant", "content": content}] if is_text else as_messages(record, column)
    if record.values.get(config.prompt_key) is None:
        return response
    prompt = as_messages(record, config.prompt_key)
    said = _said(prompt)
    if response[: len(prompt)] == prompt:  # some files repeat the prompt in both conversations
        return response
    if said and _said(response)[: len(said)] == said:
        system = prompt[:1] if prompt[0]["role"] == "system" != response[0]["role"] else []
        return [*system, *response]
    if response[0]["role"] == "system" or response[0]["role"] == prompt[-1]["role"] == "user":
        rule = f"column {column} is a whole conversation, but not one that begins with {config.prompt_key}"
        remedy = f"{column} without the prompt, or the row without {config.prompt_key}"
        raise ConfigError([record.problem(rule, remedy)])
    return [*prompt, *response]


def _said(chat: Messages) -> list[tuple[str, str]]:
    """Who said what, without system messages and the white space around a text."""
    return [(one["role"], one["content"].strip()) for one in chat if one["role"] != "system"]


def _ended(
    tokenizer: PreTrainedTokenizerBase, special: set[int], one: Conversation, chat: Messages
) -> Conversation:
    """Drops what the chat template appends after the end of the last turn, such as white space or a second
    control token: no model samples it, and the reward model's score must be taken at the token before."""
    ids, trained, content = one.ids.tolist(), one.trained.tolist(), chat[-1]["content"].rstrip()
    start = len(ids)
    while start > 0 and (trained[start - 1] or 1 not in trained[start:]):
        text = str(tokenizer.decode(ids[start - 1])).strip()
        is_control = ids[start - 1] in special and text not in _WITHIN_A_TURN
        if text and (not is_control or content.endswith(text)):
            break
        start -= 1
    end = next((i + 1 for i in range(start, len(ids)) if ids[i] in special), len(ids))
    return Conversation(one.ids[:end], one.trained[:end])


def _cut(pair: Sequence[Conversation], config: PairsConfig) -> list[Conversation] | None:
    """Both with at most `max_length` tokens. Truncation on the left removes the same number from both, so
    that they still share their prompt. None: nothing that differs would be left, or a response would lose its
    beginning."""
    if config.truncation != "left":
        return _only_what_differs(*(truncated(one, config.max_length, config.truncation) for one in pair))
    start = max(0, *(len(one.ids) - config.max_length for one in pair))
    if start >= min(max(1, int(one.trained.nonzero()[0])) for one in pair):
        return None
    return [Conversation(one.ids[start:], one.trained[start:]) for one in pair]


def _only_what_differs(chosen: Conversation, rejected: Conversation) -> list[Conversation] | None:
    """Both with their shared leading turns masked out, so that only the rest is compared. Where one side
    continues the other, the shorter one's last turn counts on both. None: they are the same."""
    shortest = min(len(chosen.ids), len(rejected.ids))
    same = (chosen.ids[:shortest] == rejected.ids[:shortest]).long().cumprod(0)
    common = int(same.sum())
    if common == shortest and len(chosen.ids) != len(rejected.ids):
        shorter = min(chosen, rejected, key=lambda one: len(one.ids))
        common = min(common, int(shorter.trained.nonzero()[-1]))  # before the end of its last turn
    both = [replace(one, trained=_after(one.trained, common)) for one in (chosen, rejected)]
    return both if all(bool(one.trained[1:].any()) for one in both) else None


def _after(trained: torch.Tensor, common: int) -> torch.Tensor:
    """The mask with those turns cleared that end within the first `common` tokens.

    >>> _after(torch.tensor([0, 1, 1, 0, 1, 1]), 5)
    tensor([0, 0, 0, 0, 1, 1])
    """
    before = torch.cat([trained.new_zeros(1), trained[:-1]])
    starts = ((trained == 1) & (before == 0)).nonzero()[:, 0].tolist()
    kept = torch.zeros_like(trained)
    for start, following in zip(starts, [*starts[1:], len(trained)]):
        run = trained[start:following]
        if start + int(run.sum()) > common:
            kept[start:following] = run
    return kept


def _margins(config: PairsConfig, records: Sequence[FileRecord]) -> list[float] | None:
    """The margin of every pair; None: none has one."""
    column = config.margin_key if isinstance(config, GradedPairsConfig) else None
    if column is None or not any(record.values.get(column) is not None for record in records):
        return None
    require_columns(records, {column: "data.margin_key"})
    problems = []
    for record in records:
        value = record.values[column]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            problems.append(record.problem(f"column {column} must be a finite number, not {value!r}"))
    raise_problems(problems)
    return [float(record.values[column]) for record in records]
