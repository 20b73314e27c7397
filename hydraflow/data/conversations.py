"""Conversations for supervised training, with the loss on the assistant's tokens only.

In: files with a `messages` column, or with a prompt and a response column. Out: `DataProto` of ragged
`prompts` (all tokens before the first trained one), ragged `responses` (the rest) and `response_mask` (1 =
trained), the engine's columns. The chat template decides which tokens are the assistant's: by its `{%
generation %}` markers if it has them, else by tokenising the conversation up to each turn, without and with
it. If both are prefixes of the whole conversation they delimit the turn; if not, `turns.py` searches for it.
Left out on purpose: guessing where a template rewrites earlier turns.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from hydraflow.data import turns as turns_of
from hydraflow.data.chat import Messages, as_messages, template_faults, tokenise_chats, without_null_fields
from hydraflow.data.config import ExamplesConfig, SFTDataConfig
from hydraflow.data.files import FileRecord, raise_problems, read_records, require_columns
from hydraflow.errors import ConfigError
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_REWRITES = """message {}: the chat template renders the conversation up to it differently when more \
follows, so its tokens cannot be identified"""
_INSTEAD = "set a custom_chat_template with {% generation %} markers, or write one row per assistant turn"
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Conversation:
    """Tokens of one conversation and which of them are trained."""

    ids: torch.Tensor  # (T,) int64
    trained: torch.Tensor  # (T,) int64, 1 = the assistant's


@dataclass(frozen=True)
class TrainedRow:
    """A prompt of at least one token and the rest, in the engine's columns."""

    prompt: torch.Tensor
    response: torch.Tensor
    mask: torch.Tensor

    @property
    def tokens(self) -> int:
        """Length of the row: prompt and response."""
        return len(self.prompt) + len(self.response)

    @classmethod
    def of(cls, conversation: Conversation) -> TrainedRow:
        """Splits a conversation before its first trained token."""
        ids, trained = conversation.ids, conversation.trained
        start = max(1, int(trained.nonzero()[0]))
        return cls(ids[:start], ids[start:], trained[start:])


def columns_of(rows: Sequence[TrainedRow]) -> dict[str, torch.Tensor]:
    """Ragged int64 `prompts` (B, P), `responses` (B, R) and `response_mask` (B, R)."""
    return {
        "prompts": ragged.from_rows([row.prompt for row in rows]),
        "responses": ragged.from_rows([row.response for row in rows]),
        "response_mask": ragged.from_rows([row.mask for row in rows]),
    }


class ConversationDataset:
    """Tokenised conversations with their loss masks. Raises `ConfigError` for unusable files, rows without a
    needed column, conversations without an assistant turn, overlong ones under truncation=error, and chat
    templates under which the assistant's tokens cannot be identified."""

    def __init__(
        self,
        config: SFTDataConfig,
        files: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        key: str = "data.train_files",
        max_samples: int = -1,
    ):
        records, chats = read_chats(config, files, key=key, max_samples=max_samples)
        conversations = tokenised(tokenizer, chats, records, config)
        cut = [truncated(c, config.max_length, config.truncation) for c in conversations]
        kept = [c for c in cut if bool(c.trained[1:].any())]  # nothing predicts the first token
        _report_dropped(len(cut) - len(kept), len(cut), key)
        self._rows = list(map(TrainedRow.of, kept))

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max((row.tokens for row in self._rows), default=0)

    def batch(self, rows: Sequence[int] | np.ndarray) -> DataProto:
        """The conversations of `rows`, as `columns_of`."""
        picked = [self._rows[i] for i in np.asarray(rows, dtype=np.int64).tolist()]
        return DataProto.from_dict(tensors=columns_of(picked))


def tokenised(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[Messages],
    records: Sequence[FileRecord],
    config: ExamplesConfig,
) -> list[Conversation]:
    """Tokens and masks of `chats`, not truncated yet; chats with the same template variables are tokenised
    together. `records[i]` is the source of `chats[i]`. Raises ConfigError for conversations longer than
    `max_length` under truncation=error, and for those that the chat template refuses."""
    variables = [_variables(record, config) for record in records]
    alike: dict[str, list[int]] = {}
    for row, named in enumerate(variables):
        # templates see the order of keys
        alike.setdefault(json.dumps(named, default=repr), []).append(row)
    found: dict[int, Conversation] = {}
    for rows in alike.values():
        theirs = [chats[row] for row in rows], [records[row] for row in rows]
        made = _tokenise_alike(tokenizer, *theirs, variables[rows[0]])
        found |= zip(rows, made, strict=True)
    conversations = [found[row] for row in range(len(chats))]
    _check_lengths(conversations, records, config)
    return conversations


def _variables(record: FileRecord, config: ExamplesConfig) -> dict[str, Any]:
    """Variables of the chat template besides the messages."""
    named = {"tools": config.tools_key, "enable_thinking": config.enable_thinking_key}
    values = {name: record.values.get(column) for name, column in named.items() if column is not None}
    given = {name: without_null_fields(record, value) for name, value in values.items() if value is not None}
    return {**config.apply_chat_template_kwargs, **given}


def _tokenise_alike(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[Messages],
    records: Sequence[FileRecord],
    template_kwargs: dict[str, Any],
) -> list[Conversation]:
    if _MARKERS.search(str(tokenizer.chat_template)):
        pairs = zip(chats, records, strict=True)
        conversations = [_by_markers(tokenizer, chat, record, template_kwargs) for chat, record in pairs]
    else:
        conversations = _by_prefixes(tokenizer, chats, records, template_kwargs)
    untrained = [r for c, r in zip(conversations, records, strict=True) if not c.trained.any()]
    raise_problems([record.problem("it has no assistant tokens") for record in untrained])
    return conversations


def read_chats(
    config: SFTDataConfig, files: Any, *, key: str, max_samples: int
) -> tuple[list[FileRecord], list[Messages]]:
    """Rows and their conversations, not tokenised yet. Raises ConfigError for unusable files and for rows
    that are not conversations."""
    records = read_records(files, key=key, limit=max_samples)
    with_messages = [record for record in records if config.messages_key in record.values]
    pairs = [record for record in records if config.messages_key not in record.values]
    require_columns(with_messages, {config.messages_key: "data.messages_key"})
    require_columns(pairs, {config.prompt_key: "data.prompt_key", config.response_key: "data.response_key"})
    chats = [_read_chat(record, config) for record in records]
    require_turns(records, chats)
    return records, chats


def require_turns(records: Sequence[FileRecord], chats: Sequence[Messages]) -> None:
    """Raises ConfigError for conversations without an assistant's message, or that start with one."""
    turns = [(record, _assistant_turns(chat)) for record, chat in zip(records, chats, strict=True)]
    raise_problems([record.problem("has no assistant message") for record, found in turns if not found])
    rule, remedy = "starts with the assistant", "start with a system or user message"
    raise_problems([record.problem(rule, remedy) for record, found in turns if found[0] == 0])


def _read_chat(record: FileRecord, config: SFTDataConfig) -> Messages:
    if config.messages_key in record.values:
        return as_messages(record, config.messages_key)
    response = _inside(record, config.response_key, config.response_dict_keys)
    prompt = {config.prompt_key: _inside(record, config.prompt_key, config.prompt_dict_keys)}
    asked = as_messages(replace(record, values=prompt), config.prompt_key)
    if isinstance(response, Mapping | list | bytes):
        column = ".".join([config.response_key, *(config.response_dict_keys or ())])
        inside = "data.response_dict_keys=[<name>] for a text inside it"
        remedy = inside if isinstance(response, Mapping) else "data.response_key=<a column of texts>"
        raise ConfigError([record.problem(f"{column} must be text, not {str(response)[:80]}", remedy)])
    return [*asked, {"role": "assistant", "content": str(response)}]


def _inside(record: FileRecord, column: str, names: Sequence[str] | None) -> Any:
    """The value at this path of names inside a column; a list with a single entry counts as that entry."""
    value = record.values[column]
    for name in names or ():
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        inner = value.get(name) if isinstance(value, Mapping) else None
        if inner is None:
            there = (
                f"it has {', '.join(map(str, value))}" if isinstance(value, Mapping) else "it has no names"
            )
            raise ConfigError([record.problem(f"column {column} has nothing under {name}; {there}")])
        value = inner
    return value


def _assistant_turns(chat: Messages) -> list[int]:
    return [i for i, message in enumerate(chat) if message["role"] == "assistant"]


def _by_markers(
    tokenizer: PreTrainedTokenizerBase, chat: Messages, record: FileRecord, template_kwargs: dict[str, Any]
) -> Conversation:
    options = {**template_kwargs, "return_dict": True, "return_assistant_tokens_mask": True}
    with template_faults(record):
        whole = tokenizer.apply_chat_template(chat, **options, add_generation_prompt=False)
    encoded = cast("dict[str, list[int]]", whole)
    return Conversation(torch.tensor(encoded["input_ids"]), torch.tensor(encoded["assistant_masks"]))


def _by_prefixes(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[Messages],
    records: Sequence[FileRecord],
    template_kwargs: dict[str, Any],
) -> list[Conversation]:
    turns = [(row, turn) for row, chat in enumerate(chats) for turn in _assistant_turns(chat)]
    owners = [records[row] for row, _ in turns]
    options = dict(template_kwargs=template_kwargs)
    whole = tokenise_chats(tokenizer, chats, records, add_generation_prompt=False, **options)
    openings = [chats[row][:turn] for row, turn in turns]
    before = tokenise_chats(tokenizer, openings, owners, add_generation_prompt=True, **options)
    # a conversation's last turn ends where the conversation ends: the common case needs no third tokenisation
    inner = [(i, row, turn) for i, (row, turn) in enumerate(turns) if turn + 1 < len(chats[row])]
    upto, owned = [chats[row][: turn + 1] for _, row, turn in inner], [owners[i] for i, _, _ in inner]
    ends = tokenise_chats(tokenizer, upto, owned, add_generation_prompt=False, **options)
    after = {i: end for (i, _, _), end in zip(inner, ends, strict=True)}

    special = special_ids(tokenizer)
    find_turn = partial(turns_of.find_turn, tokenizer, special=special, template_kwargs=template_kwargs)
    masks = [np.zeros(len(ids), dtype=np.int64) for ids in whole]
    problems = []
    for i, (row, turn) in enumerate(turns):
        ids, start, end = whole[row], before[i], after.get(i, whole[row])
        found: tuple[int, int] | None
        if ids[: len(start)] == start and ids[: len(end)] == end and len(end) > len(start):
            found = len(start), turns_of.end_of_turn(tokenizer, ids, len(start), len(end), special)
        else:
            with template_faults(records[row]):
                found = find_turn(chats[row], turn, whole=ids, before=start)
        if found is None:
            problems.append(records[row].problem(_REWRITES.format(turn), _INSTEAD))
            continue
        masks[row][slice(*found)] = 1
    raise_problems(problems)
    pairs = zip(whole, masks, strict=True)
    return [Conversation(torch.tensor(ids), torch.from_numpy(mask)) for ids, mask in pairs]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of the tokenizer's control tokens."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(number for number, token in added if token.special)}


def _check_lengths(
    conversations: Sequence[Conversation], records: Sequence[FileRecord], config: ExamplesConfig
) -> None:
    if config.truncation != "error":
        return
    sizes, limit = [len(c.ids) for c in conversations], config.max_length
    remedy = f"data.max_length={max(sizes)} or data.truncation=right"
    long = [(size, record) for size, record in zip(sizes, records, strict=True) if size > limit]
    raise_problems([r.problem(f"has {n} tokens, more than data.max_length={limit}", remedy) for n, r in long])


def truncated(conversation: Conversation, limit: int, side: str) -> Conversation:
    """At most `limit` tokens of a conversation; `side`: left or right, where it is cut."""
    if len(conversation.ids) <= limit:
        return conversation
    part = slice(len(conversation.ids) - limit, None) if side == "left" else slice(0, limit)
    return Conversation(conversation.ids[part], conversation.trained[part])


def _report_dropped(dropped: int, rows: int, key: str) -> None:
    if dropped == rows:
        rule = f"none of the {rows} conversations has a trained token within data.max_length"
        raise ConfigError.one(key, None, rule, "raise data.max_length")
    if dropped:
        why = "truncation cut all of the assistant's tokens"
        logger.warning("%s: dropped %d of %d conversations: %s", key, dropped, rows, why)
