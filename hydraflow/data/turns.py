"""Finds an assistant's turn in a tokenised conversation where prefixes of the conversation do not delimit it.

In: the whole conversation's tokens, and those up to the turn. Out: where the turn's tokens begin and end.
Many models' templates add something at the end of a conversation (Phi-3), drop the reasoning of earlier turns
(Qwen3), or open a turn with more than they keep of it later (Qwen3.5); and an answer that begins with a
newline may share a token with the newline before it. Left out on purpose: templates that rewrite earlier
messages; a turn is only found after everything that was sampled before it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hydraflow.data.chat import Messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_REASONING = "</think>"
WITHIN_A_TURN = {"<think>", END_OF_REASONING, "<|channel|>", "<|message|>"}
"""Control tokens of some models that do not end a turn; gpt-oss opens one with the last two."""


def find_turn(
    tokenizer: PreTrainedTokenizerBase,
    chat: Messages,
    turn: int,
    *,
    whole: Sequence[int],
    before: Sequence[int],
    special: set[int],
    template_kwargs: Mapping[str, Any],
) -> tuple[int, int] | None:
    """Index in `whole` of the first token of `chat[turn]`, and of the one after its end token; None: unclear.

    before: tokens of what precedes it, with the generation prompt. special: ids of control tokens.
    """

    def text_of(part: Messages, prompt: bool) -> str:
        options = {**template_kwargs, "tokenize": False, "add_generation_prompt": prompt}
        return str(tokenizer.apply_chat_template(part, **options))

    content = str(chat[turn]["content"]).rpartition(END_OF_REASONING)[2].strip()
    if not tokenizer.is_fast or (not content and chat[turn].get("tool_calls")):
        return None  # where a turn of calls alone ends is the template's to say
    text = text_of(chat, False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if list(encoded["input_ids"]) != list(whole):
        return None
    start = len(os.path.commonprefix([list(before), list(whole)]))
    opened, plain = text_of(chat[:turn], True), text_of(chat[:turn], False)
    # not opened.removeprefix(plain): `plain` may have an end token that `opened` lacks
    prompt = opened[len(os.path.commonprefix([opened, plain])) :]
    left = tokenizer.decode(list(before[start:]))
    # they differ before the generation prompt begins: earlier messages were rewritten
    if start < len(before) and len(left) >= len(prompt):
        return None
    offsets = encoded["offset_mapping"]
    for token in range(start, len(whole)):
        if whole[token] not in special:
            continue
        control = str(tokenizer.decode([whole[token]]))
        if control in WITHIN_A_TURN:
            continue
        if text[offsets[start][0] : offsets[token][0]].rstrip().endswith(content):
            return start, token + 1
        if control not in content:
            return None  # the end of another turn
    return None
