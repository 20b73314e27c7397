"""Tokenises chat messages in batches.

In: messages or plain strings from data files, a tokenizer with a chat template. Out: token ids, or errors
that name the row. Left out on purpose: images and audio; a message's content is text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from hydraflow.data.files import PARQUET_ENDING, FileRecord
from hydraflow.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]

TEMPLATE_FAULTS = (TypeError, ValueError, KeyError, AttributeError)
"""Errors that a template may raise, besides Jinja's own, because of messages or template_kwargs."""


def as_messages(record: FileRecord, column: str) -> Messages:
    """The messages in `column`; a plain string is one user message. A message that only calls tools may lack
    its content: it is empty. Raises `ConfigError` naming the row."""
    value = without_null_fields(record, record.values[column])
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list):
        value = [_with_content(message) for message in value]
    if not isinstance(value, list) or not value or not all(_is_message(m) for m in value):
        form = "a string or a list of messages with a role and a text as content"
        rule = f"column {column} must be {form}, not {str(value)[:80]}"
        raise ConfigError([record.problem(rule)])
    return [{name: part for name, part in message.items() if part is not None} for message in value]


def without_null_fields(record: FileRecord, value: Any) -> Any:
    """A nested value of the row without the nulls that Parquet adds: it gives every struct the fields of all
    others in its column, such as the arguments of other tools' calls."""
    return _without_nulls(value) if record.file.suffix == PARQUET_ENDING else value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _with_content(message: Any) -> Any:
    if isinstance(message, Mapping) and message.get("tool_calls") and message.get("content") is None:
        return {**message, "content": ""}
    return message


def _is_message(value: Any) -> bool:
    texts = [value.get("role"), value.get("content")] if isinstance(value, Mapping) else [None]
    return all(isinstance(text, str) for text in texts)


def tokenise_chats(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[Messages],
    records: Sequence[FileRecord],
    *,
    add_generation_prompt: bool,
    template_kwargs: Mapping[str, Any],
) -> list[list[int]]:
    """Token ids of each chat. `records[i]` is where `chats[i]` came from. Raises `ConfigError` naming a row
    the template refuses."""
    from jinja2 import TemplateError

    if not chats:
        return []
    options = {**template_kwargs, "tokenize": True, "return_dict": False}
    options["add_generation_prompt"] = add_generation_prompt
    try:
        return cast("list[list[int]]", tokenizer.apply_chat_template(list(chats), **options))
    except (TemplateError, *TEMPLATE_FAULTS):
        # the error does not say which chat of the batch failed: try them one by one
        for chat, record in zip(chats, records, strict=True):
            with template_faults(record):
                tokenizer.apply_chat_template(chat, **options)
        raise


@contextmanager
def template_faults(record: FileRecord) -> Iterator[None]:
    """Raises `ConfigError` naming the row where the block's chat template refuses it."""
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, *TEMPLATE_FAULTS) as error:
        raise ConfigError([record.problem(f"the chat template refuses it: {error}")]) from error
