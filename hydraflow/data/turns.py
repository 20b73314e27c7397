"""Finds an assistant's turn in a tokenised conversation where prefixes of the conversation do not delimit it.

In: the whole conversation's tokens, and those up to the turn. Out: where the turn's tokens begin and end.
Many models' templates add something at the end of a conversation (Phi-3), drop the reasoning of earlier turns
(Qwen3), or open a turn with more than they keep of it later (Qwen3.5); and an answer that begins with a
newline may share a token with the newline before it. With tool calls they also rewrite what precedes a turn:
the reasoning before a call is dropped once an answer follows (gpt-oss, Qwen3).
Left out on purpose: templates that rewrite earlier messages of conversations without tool calls.

Where a message ends is seen by rendering the conversation again with a mark in that message: it must appear
in the text once and change nothing else.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydraflow.data.chat import Messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_REASONING = "</think>"
_MARK = "~mark"
"""Begins with a character that no template writes right after a message, so that two renderings first differ
at the mark."""


def find_turn(
    tokenizer: PreTrainedTokenizerBase,
    chat: Messages,
    turn: int,
    *,
    whole: list[int],
    before: list[int],
    special: set[int],
    template_kwargs: Mapping[str, Any],
) -> tuple[int, int] | None:
    """Index in `whole` of the first token of `chat[turn]`, and of the one after its end token; None: unclear.

    before: tokens of what precedes it, with the generation prompt. special: ids of control tokens.
    """
    if not tokenizer.is_fast:
        return None
    search = _Search(tokenizer, template_kwargs, special)
    said = search.marked(chat, turn)
    if said is None or said.ids != whole:
        return None
    start, end = search.start(chat, turn, whole, before), search.end(chat, turn, said)
    return None if start is None or end is None else (start, end)


def end_of_turn(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], start: int, end: int, special: set[int]
) -> int:
    """Where the model's own tokens end in the turn ids[start:end]: white space after its end token belongs to
    the template. A turn without one ends with the control token that opens the next message, at which GLM
    stops; so a conversation's last turn has none there."""
    ends = [i for i in range(start, end) if ids[i] in special]
    if ends and not str(tokenizer.decode(ids[ends[-1] + 1 : end])).strip():
        return ends[-1] + 1
    last = next((token for token in reversed(ids[start:end]) if str(tokenizer.decode(token)).strip()), None)
    is_closed = last in tokenizer.added_tokens_decoder  # </tool_call>, for example, which may not be special
    if is_closed or end == len(ids):
        return end
    opens = ids[end] in special - {tokenizer.bos_token_id, tokenizer.pad_token_id}
    return end + 1 if opens else end


@dataclass(frozen=True)
class _Marked:
    """Tokens of messages, and the index of the first one after what one of them says."""

    ids: list[int]
    mark: int

    @property
    def after(self) -> list[int]:
        return self.ids[self.mark :]


@dataclass(frozen=True)
class _Search:
    """Compares renderings of one conversation's messages."""

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: Mapping[str, Any]
    special: set[int]

    def marked(self, part: Messages, message: int, *, prompt: bool = False) -> _Marked | None:
        """Tokens of `part`, marked after what `part[message]` says; None: the template does not write it."""
        text = self._text(part, prompt)
        other = self._text([*part[:message], _with_mark(part[message]), *part[message + 1 :]], prompt)
        mark, after = _shared(text, other), _shared(text[::-1], other[::-1])
        if len(other) <= len(text) or mark + after < len(text):
            return None
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends = [end for _, end in encoded["offset_mapping"]]
        return _Marked(list(encoded["input_ids"]), bisect_right(ends, mark))

    def start(self, chat: Messages, turn: int, whole: list[int], before: list[int]) -> int | None:
        """Index of the turn's first token. `whole` may lack some of the generation prompt, but not all."""
        opened, plain = self._text(chat[:turn], True), self._text(chat[:turn], False)
        # not opened.removeprefix(plain): `plain` may have an end token that `opened` lacks
        prompt = len(opened) - _shared(opened, plain)
        start = self._kept(whole, before, prompt)
        if start is not None or not any(message.get("tool_calls") for message in chat):
            return start
        # earlier messages were rewritten: compare what follows the one before the turn
        here, there = self.marked(chat, turn - 1), self.marked(chat[:turn], turn - 1, prompt=True)
        if here is None or there is None:
            return None
        kept = self._kept(here.after, there.after, prompt)
        return None if kept is None else here.mark + kept

    def _kept(self, ids: list[int], opening: list[int], prompt: int) -> int | None:
        """How many of an opening's tokens `ids` begins with; None: it lacks all of the generation prompt of
        `prompt` characters, or is cut inside of a word."""
        kept = _shared(ids, opening)
        lost = self._decoded(opening[kept:])
        if lost and len(lost) >= prompt:
            return None
        if not lost.strip():
            return kept
        # the "<" of a "<think>" that is dropped may be the first token of the turn's "<tool_call>"
        last = opening[kept - 1]
        is_clean = last in self.tokenizer.added_tokens_decoder or self._decoded([last])[-1:].isspace()
        return kept if is_clean else None

    def end(self, chat: Messages, turn: int, said: _Marked) -> int | None:
        """Index after the turn's end token. A text is followed by it; a call by what closes the call, which
        is what this conversation shares with the one that ends with the turn."""
        alone: list[int] = []
        if chat[turn].get("tool_calls"):
            ending = self.marked(chat[: turn + 1], turn)
            if ending is None:
                return None
            alone = ending.after
        ids, closed = said.ids, said.mark + _shared(said.after, alone)
        following = next((i for i in range(closed, len(ids)) if self._decoded([ids[i]]).strip()), -1)
        ends = [end_of_turn(self.tokenizer, ids, said.mark, closed, self.special) - 1, following]
        ends = [i for i in ends if i >= said.mark and ids[i] in self.special]
        if self._decoded(alone[closed - said.mark :]).strip():
            # a conversation ends in another way than its turns, so either token may be the turn's last
            usual = self._end_token(chat, turn - 1)
            ends = [i for i in ends if ids[i] == usual]
        return ends[0] + 1 if ends else None

    def _end_token(self, chat: Messages, message: int) -> int | None:
        """The first control token after what a message says."""
        said = self.marked(chat, message)
        return next((token for token in said.after if token in self.special), None) if said else None

    def _text(self, part: Messages, prompt: bool) -> str:
        options = {**self.template_kwargs, "tokenize": False, "add_generation_prompt": prompt}
        return str(self.tokenizer.apply_chat_template(part, **options))

    def _decoded(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the common prefix, by bisection: a loop over characters takes longer than all the rest."""
    lengths = range(1, min(len(one), len(other)) + 1)
    return bisect_left(lengths, True, key=lambda length: one[:length] != other[:length])


def _with_mark(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the mark after the last thing it says: its last call's arguments, or else its text."""
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        return {**message, "tool_calls": [*calls[:-1], _call_with_mark(calls[-1])]}
    content = str(message["content"])
    said = content.rstrip()
    # a template may strip the white space around a text, or between reasoning and an empty text
    at = len(content) if said.endswith(END_OF_REASONING) else len(said)
    return {**message, "content": content[:at] + _MARK + content[at:]}


def _call_with_mark(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if "function" in call:
        return {**call, "function": _call_with_mark(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        return {**call, "arguments": arguments + _MARK}
    return {**call, "arguments": {**arguments, _MARK: _MARK}} if isinstance(arguments, Mapping) else call
