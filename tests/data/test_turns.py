"""The assistant's tokens under the plain templates of models that write a conversation's end, or its earlier
turns, in another way than a turn alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hydraflow.data.config import SFTDataConfig
from hydraflow.data.conversations import ConversationDataset
from hydraflow.errors import ConfigError
from hydraflow.protocol import ragged

SPECIAL = ["<|start|>", "<|end|>", "<|endoftext|>", "<|User|>", "<|Assistant|>", "<|channel|>", "<|message|>"]
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
LAST = "<|end|>\n<|endoftext|>"
"""How PHI3 ends a conversation."""
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""As gpt-oss."""
REPLACES = (
    CHAT
    + "{% if m.role == 'assistant' and not loop.last %}[...]{% else %}{{ m.content }}{% endif %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
REASONED = "<think>\nthree\n</think>\n\n"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character but for two newlines, which are one."""
    letters = [chr(i) for i in range(32, 127)] + ["\n"]
    vocabulary = {letter: i for i, letter in enumerate([*letters, "\n\n"])}
    made = Tokenizer(models.BPE(vocabulary, [("\n", "\n")]))
    made.decoder = decoders.Fuse()
    made.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>")


def trained(tokenizer: PreTrainedTokenizerFast, template: str, answers: list[str], folder: Path) -> list[str]:
    """The runs of tokens that are trained, as text."""
    tokenizer.chat_template = template
    turns = [
        message
        for i, answer in enumerate(answers)
        for message in ({"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": answer})
    ]
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
        (PHI3, ["", "two"], ["<|end|>", "two" + LAST]),
        (PHI3, ["one", "\ntwo"], ["one<|end|>", "\n\ntwo<|end|>"]),
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
