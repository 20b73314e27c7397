"""The assistant's tokens under the plain templates of models that write a conversation's end, or its earlier
turns, in another way than a turn alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hydraflow.data.config import SFTDataConfig
from hydraflow.data.conversations import ConversationDataset
from hydraflow.errors import ConfigError
from hydraflow.protocol import ragged

SPECIAL = [
    *("<|start|>", "<|end|>", "<|endoftext|>", "<|User|>", "<|Assistant|>", "<|channel|>", "<|message|>"),
    *(
        "<|user|>",
        "<|assistant|>",
        "<|call|>",
        "<|return|>",
        "<|sep|>",
        "<|outputs_begin|>",
        "<|outputs_end|>",
    ),
    *("<|calls_begin|>", "<|calls_end|>", "<|call_begin|>", "<|call_end|>"),
]
CHAT = "{% for m in messages %}<|start|>{{ m.role }}\n"
QWEN3 = (
    CHAT + "{% if m.role == 'assistant' %}{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.last %}<think>\n{% if '</think>' in m.content %}"
    "{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') }}{% endif %}"
    "{{ '\n' }}</think>\n\n{% endif %}{{ said }}{% else %}{{ m.content }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
OPENS_WITH_MORE = QWEN3.replace("<|start|>assistant\n{% endif %}", "<|start|>assistant\n<think>\n{% endif %}")
"""As Qwen3.5: the generation prompt begins the reasoning, which earlier turns do not keep."""
PHI3 = (
    CHAT + "{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% else %}<|endoftext|>{% endif %}"
)
CHATML = (
    CHAT + "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>"
    "{{ m.content.split('</think>')[-1] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
DEEPSEEK_ENDING = DEEPSEEK.replace("<think>\n{% endif %}", "<think>\n{% else %}<|endoftext|>{% endif %}")
LAST = "<|end|>\n<|endoftext|>"
"""How PHI3 ends a conversation."""
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""As gpt-oss."""
GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}"
    "{% if loop.last and '</think>' in m.content %}{{ m.content.split('</think>')[0] }}</think>"
    "{% else %}<think></think>{% endif %}{{ m.content.split('</think>')[-1].strip() }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Its turns have no end token."""
CLOSED = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</tool_call>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""By a token that is not a control token."""
BEGINS_AGAIN = (
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>{{ m.content }}\n{% else %}{{ m.content }}"
    "{% endif %}{% endfor %}"
)
"""The token before a user's message begins a text, and so ends none."""
REPLACES = (
    CHAT
    + "{% if m.role == 'assistant' and not loop.last %}[...]{% else %}{{ m.content }}{% endif %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
REASONED = "<think>\nthree\n</think>\n\n"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character, for two newlines, and for what opens and closes reasoning and calls."""
    letters = [chr(i) for i in range(32, 127)] + ["\n"]
    vocabulary = {letter: i for i, letter in enumerate([*letters, "\n\n"])}
    made = Tokenizer(models.BPE(vocabulary, [("\n", "\n")]))
    made.decoder = decoders.Fuse()
    made.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    made.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<|start|>", eos_token="<|endoftext|>")


def trained(tokenizer: PreTrainedTokenizerFast, template: str, answers: list[str], folder: Path) -> list[str]:
    """As `trained_of`, of a conversation with these answers."""
    turns = [
        message
        for i, answer in enumerate(answers)
        for message in ({"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": answer})
    ]
    return trained_of(tokenizer, template, turns, folder)


def trained_of(
    tokenizer: PreTrainedTokenizerFast, template: str, turns: list[dict[str, Any]], folder: Path
) -> list[str]:
    """The runs of tokens that are trained, as text."""
    tokenizer.chat_template = template
    (folder / "a.jsonl").write_text(json.dumps({"messages": turns}))
    batch = ConversationDataset(SFTDataConfig(), folder / "a.jsonl", tokenizer).batch([0])
    (ids,), (mask,) = (ragged.rows(batch.get(name)) for name in ("responses", "response_mask"))
    pieces: list[list[int]] = [[]]
    for token, counts in zip(ids.tolist(), mask.tolist(), strict=True):
        if counts:
            pieces[-1].append(token)
        elif pieces[-1]:
            pieces.append([])
    return [str(tokenizer.decode(piece)) for piece in pieces if piece]


@pytest.mark.parametrize(
    ("template", "answers", "expected"),
    [
        (QWEN3, ["one"], ["<think>\n\n</think>\n\none<|end|>"]),
        (QWEN3, ["one", "two"], ["one<|end|>", "<think>\n\n</think>\n\ntwo<|end|>"]),
        (QWEN3, [REASONED + "one", REASONED + "two"], ["one<|end|>", REASONED + "two<|end|>"]),
        (OPENS_WITH_MORE, [REASONED + "one"], ["three\n</think>\n\none<|end|>"]),
        (OPENS_WITH_MORE, ["one", REASONED + "two"], ["one<|end|>", "three\n</think>\n\ntwo<|end|>"]),
        (PHI3, ["one", "two", "three"], ["one<|end|>", "two<|end|>", "three" + LAST]),
        (CHATML, ["one", "\ntwo"], ["one<|end|>", "\n\ntwo<|end|>"]),
        (CHATML, ["\none"], ["\n\none<|end|>"]),
        (DEEPSEEK, ["one"], ["one<|end|>"]),
        (DEEPSEEK, [REASONED + "one", "two"], ["\n\none<|end|>", "two<|end|>"]),
        (DEEPSEEK_ENDING, ["one", "two"], ["one<|end|>", "two<|end|>"]),
        (CHATML, ["says <|end|> and goes on", "two"], ["says <|end|> and goes on<|end|>", "two<|end|>"]),
        (PHI3, ["says <|end|> and goes on", "two"], ["says <|end|> and goes on<|end|>", "two" + LAST]),
        (
            PHI3,
            ["<think>\nit is 4\n</think>\n\n4", "two"],
            ["<think>\nit is 4\n</think>\n\n4<|end|>", "two" + LAST],
        ),
        (
            HARMONY,
            ["one", "two"],
            ["<|channel|>final<|message|>one<|end|>", "<|channel|>final<|message|>two<|end|>"],
        ),
        (QWEN3, [REASONED, "two"], ["<|end|>", "<think>\n\n</think>\n\ntwo<|end|>"]),
        (PHI3.replace("m.content", "m.content | trim"), ["one\n", "two"], ["one<|end|>", "two" + LAST]),
        (PHI3, ["one\n", "two"], ["one\n<|end|>", "two" + LAST]),
        (PHI3, ["", "two"], ["<|end|>", "two" + LAST]),
        (PHI3, ["one", "\ntwo"], ["one<|end|>", "\n\ntwo<|end|>"]),
        (GLM, ["one", "two"], ["\n<think></think>one<|user|>", "\n<think></think>two"]),
        (
            GLM,
            [REASONED + "one", REASONED + "two"],
            ["\n<think></think>one<|user|>", "\n<think>\nthree\n</think>two"],
        ),
        (BEGINS_AGAIN, ["one", "two"], ["one", "two"]),
        (CLOSED, ["one", "two"], ["one</tool_call>", "two</tool_call>"]),
        (
            GLM,
            ["It says <|end|> here", "so <|end|>  does this"],
            ["\n<think></think>It says <|end|> here<|user|>", "\n<think></think>so <|end|>  does this"],
        ),
    ],
)
def test_exactly_the_assistants_tokens_are_trained(
    template: str, answers: list[str], expected: list[str], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    assert trained(tokenizer, template, answers, tmp_path) == expected


def test_an_answer_that_the_template_replaces_is_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Also where the next user's message is the answer's text."""
    with pytest.raises(ConfigError, match="message 1: the chat template renders the conversation up to it"):
        trained(tokenizer, REPLACES, ["q1", "two"], tmp_path)


def test_an_answer_that_shares_the_beginning_of_a_dropped_word_is_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """The "<" of "<b>" is also in the generation prompt, whose "<reason>" earlier turns do not keep."""
    template = OPENS_WITH_MORE.replace("think>", "reason>")
    with pytest.raises(ConfigError, match="message 1: the chat template renders the conversation up to it"):
        trained(tokenizer, template, ["<b>one", "two"], tmp_path)


QWEN3_CALLS = """
{%- set asked = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- set parts = m.content.split('</think>') %}
    {%- set said = parts[-1].lstrip('\n') %}
    {%- set thought = parts[0].split('<think>')[-1].strip('\n') if parts[1:] %}
    {%- if m.role == 'assistant' %}
        {{- '<|start|>assistant\n' }}
        {%- if loop.index0 > asked.last and (loop.last or thought) %}
            {{- '<think>\n' + (thought or '') + '\n</think>\n\n' }}
        {%- endif %}
        {{- said }}
        {%- for call in m.tool_calls or [] %}
            {{- ('\n' if said or not loop.first else '') + '<tool_call>\n{"name": "' + call.function.name }}
            {{- '", "arguments": ' + call.function.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>user' if loop.previtem.role != 'tool' else '' }}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {{- '<|end|>\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
    {%- else %}
        {{- '<|start|>user\n' + m.content + '<|end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"""
"""Keeps the reasoning since the last question, and gives the last turn an empty one."""
QWEN35_CALLS = QWEN3_CALLS.replace("(loop.last or thought)", "true").replace(
    "{{ '<|start|>assistant\n' }}", "{{ '<|start|>assistant\n<think>\n' }}"
)
HARMONY_CALLS = """
{%- set called = namespace(name='') %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {%- set later = namespace(answer=false) %}
        {%- for n in messages[loop.index:] if n.role == 'assistant' and not n.tool_calls %}
            {%- set later.answer = true %}
        {%- endfor %}
        {%- if (m.content or m.thinking) and not later.answer %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}
        {%- endif %}
        {%- set called.name = m.tool_calls[0].function.name %}
        {{- '<|start|>assistant to=functions.' + called.name + '<|channel|>commentary json<|message|>' }}
        {{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
    {%- elif m.role == 'assistant' %}
        {%- set last = loop.last and not add_generation_prompt %}
        {%- if last and m.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
        {{- '<|return|>' if last else '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
"""As gpt-oss: one call a message, whose analysis goes once an answer follows."""
DEEPSEEK_CALLS = """
{%- set seen = namespace(call=false, output=false, tool=false) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set seen.tool = false %}
        {{- '<|User|>' + m.content }}
    {%- elif m.role == 'tool' %}
        {{- '<|outputs_begin|>' if not seen.output else '' }}
        {%- set seen.output = true %}
        {%- set seen.tool = true %}
        {{- '<|sep|>' + m.content + '<|sep|>' }}
    {%- elif m.tool_calls %}
        {%- set seen.tool = false %}
        {%- for call in m.tool_calls %}
            {{- '\n' if seen.call else '<|Assistant|>' + m.content + '<|calls_begin|>' }}
            {%- set seen.call = true %}
            {{- '<|call_begin|>' + call.type + '<|sep|>' + call.function.name + '\n```json\n' }}
            {{- call.function.arguments + '\n```<|call_end|>' }}
        {%- endfor %}
        {{- '<|calls_end|><|end|>' }}
    {%- else %}
        {%- set said = m.content if seen.tool else m.content.split('</think>')[-1] %}
        {{- ('<|outputs_end|>' if seen.tool else '<|Assistant|>') + said + '<|end|>' }}
        {%- set seen.tool = false %}
    {%- endif %}
{%- endfor %}
{{- '<|outputs_end|>' if seen.tool else '' }}
{%- if add_generation_prompt and not seen.tool %}{{ '<|Assistant|><think>\n' }}{% endif %}"""
"""As DeepSeek-V3 and R1, which write the opening of a call only for a conversation's first."""
PHI4_CALLS = """
{%- for m in messages %}
    {{- '<|start|>' + m.role + m.content }}
    {%- if m.tool_calls %}<|calls_begin|>{{ m.tool_calls | tojson }}<|calls_end|>{% endif %}
    {{- '<|end|>' }}
{%- endfor %}
{{- '<|start|>assistant' if add_generation_prompt else '<|endoftext|>' }}"""
OLMO3_CALLS = PHI4_CALLS.replace("else '<|endoftext|>'", "else ''").replace(
    "{{- '<|end|>' }}", "{{- '<|endoftext|>' if loop.last and m.role == 'assistant' else '<|end|>\\n' }}"
)
"""Ends a conversation with another token than its turns."""


def asks(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, *calls: dict[str, Any], **more: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more} | ({"tool_calls": list(calls)} if calls else {})


def returns(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


F, G = call("f", {"a": 1}), call("g", {})
QWEN3_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
QWEN3_G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
HARMONY_F = ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
HARMONY_G = " to=functions.g<|channel|>commentary json<|message|>{}<|call|>"
FINAL = "<|channel|>final<|message|>"
WRITTEN_F, WRITTEN_G = call("f", '{"a": 1}'), call("g", "{}")
DEEPSEEK_F = '<|call_begin|>function<|sep|>f\n```json\n{"a": 1}\n```<|call_end|>'
DEEPSEEK_G = "<|call_begin|>function<|sep|>g\n```json\n{}\n```<|call_end|>"
PHI4_F = f"<|calls_begin|>{json.dumps([F])}<|calls_end|>"
NO_REASON = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("template", "turns", "expected"),
    [
        (QWEN3_CALLS, [asks("q"), says("", F)], [f"{NO_REASON}{QWEN3_F}<|end|>"]),
        (
            QWEN3_CALLS,
            [asks("q"), says("", F), returns("r"), says("so")],
            [f"{QWEN3_F}<|end|>", f"{NO_REASON}so<|end|>"],
        ),
        (
            QWEN3_CALLS,
            [asks("q"), says("well", F, G), returns("r"), returns("s"), says("so")],
            [f"well\n{QWEN3_F}\n{QWEN3_G}<|end|>", f"{NO_REASON}so<|end|>"],
        ),
        (
            QWEN3_CALLS,
            [asks("q"), says(REASONED, F), returns("r"), says(REASONED + "so"), asks("p"), says("", G)],
            [f"{QWEN3_F}<|end|>", "so<|end|>", f"{NO_REASON}{QWEN3_G}<|end|>"],
        ),
        (
            QWEN3_CALLS,
            [asks("q"), says(REASONED, F), returns("r"), says("", G), returns("s"), says("so")],
            [f"{REASONED}{QWEN3_F}<|end|>", f"{QWEN3_G}<|end|>", f"{NO_REASON}so<|end|>"],
        ),
        (
            QWEN35_CALLS,
            [asks("q"), says(REASONED, F, G), returns("r"), returns("s"), says("so"), asks("p"), says("end")],
            [f"{QWEN3_F}\n{QWEN3_G}<|end|>", "so<|end|>", "\n\n</think>\n\nend<|end|>"],
        ),
        (
            HARMONY_CALLS,
            [asks("q"), says("", F, thinking="hm")],
            [f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{HARMONY_F}"],
        ),
        (
            HARMONY_CALLS,
            [asks("q"), says("", F, thinking="hm"), returns("r"), says("so", thinking="ah")],
            [HARMONY_F, f"<|channel|>analysis<|message|>ah<|end|><|start|>assistant{FINAL}so<|return|>"],
        ),
        (
            HARMONY_CALLS,
            [
                asks("q"),
                says("hm", F),
                returns("r"),
                says("ah", G),
                returns("s"),
                says("so"),
                asks("p"),
                says("x"),
            ],
            [HARMONY_F, HARMONY_G, f"{FINAL}so<|end|>", f"{FINAL}x<|return|>"],
        ),
        (
            DEEPSEEK_CALLS,
            [asks("q"), says("", WRITTEN_F)],
            [f"<|calls_begin|>{DEEPSEEK_F}<|calls_end|><|end|>"],
        ),
        (
            DEEPSEEK_CALLS,
            [asks("q"), says("well", WRITTEN_F, WRITTEN_G), returns("r"), returns("s"), says("so")],
            [f"well<|calls_begin|>{DEEPSEEK_F}\n{DEEPSEEK_G}<|calls_end|><|end|>", "so<|end|>"],
        ),
        (
            DEEPSEEK_CALLS,
            [asks("q"), says("", WRITTEN_F), returns("r"), says("so"), asks("p"), says(REASONED + "end")],
            [f"<|calls_begin|>{DEEPSEEK_F}<|calls_end|><|end|>", "so<|end|>", "\n\nend<|end|>"],
        ),
        (
            PHI4_CALLS,
            [asks("q"), says("", F), returns("r"), says("so")],
            [f"{PHI4_F}<|end|>", "so<|end|><|endoftext|>"],
        ),
        (
            OLMO3_CALLS,
            [asks("q"), says("well", F["function"]), returns("r"), says("so")],
            [f"well<|calls_begin|>{json.dumps([F['function']])}<|calls_end|><|end|>", "so<|endoftext|>"],
        ),
    ],
)
def test_exactly_the_assistants_calls_are_trained(
    template: str,
    turns: list[dict[str, Any]],
    expected: list[str],
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    assert trained_of(tokenizer, template, turns, tmp_path) == expected


@pytest.mark.parametrize(
    ("template", "turns", "message"),
    [
        # a second call that is not written
        (HARMONY_CALLS, [asks("q"), says("hm", F, G), returns("r"), says("so")], 1),
        # a call that is not written as what the model generates
        (
            QWEN3_CALLS.replace("call.function.arguments |", "loop.length |"),
            [asks("q"), says("", F), says("so")],
            1,
        ),
        # a call that does not begin as the generation prompt does
        (
            DEEPSEEK_CALLS,
            [asks("q"), says("", WRITTEN_F), returns("r"), says("", WRITTEN_G), returns("s"), says("so")],
            3,
        ),
        # a turn that may end with either of two tokens
        (
            PHI4_CALLS.replace("'<|end|>'", "'' if m.tool_calls else '<|end|>'"),
            [asks("q"), says("", F), returns("r"), says("so")],
            1,
        ),
    ],
)
def test_calls_that_cannot_be_identified_are_refused(
    template: str,
    turns: list[dict[str, Any]],
    message: int,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    with pytest.raises(
        ConfigError, match=f"message {message}: the chat template renders the conversation up"
    ):
        trained_of(tokenizer, template, turns, tmp_path)
