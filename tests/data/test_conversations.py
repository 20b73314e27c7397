"""Supervised conversations: exactly the assistant's tokens are trained."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from hydraflow.data.config import SFTDataConfig
from hydraflow.data.conversations import ConversationDataset
from hydraflow.data.files import write_rows
from hydraflow.errors import ConfigError
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto

END = "<|end|>"
TURNS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}={{ m['content'] }}<|end|> {% else %}{{"
    " m['content'] }}{% endif %}{% endfor %}"
)
"""An assistant's turn opens with "=" (as the generation prompt does) and ends with the end token and the
template's own space."""
WITH_PROMPT = TURNS + "{% if add_generation_prompt %}={% endif %}"
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}={% generation %}{{ m['content'] }}<|end|>{%"
    " endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
TWO_TURNS = [
    {"role": "user", "content": "1+2"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "4+5"},
    {"role": "assistant", "content": "9"},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def texts(batch: DataProto, tokenizer: PreTrainedTokenizerFast) -> list[tuple[str, list[tuple[str, int]]]]:
    """(prompt text, [(response token, mask)]) per row."""
    columns = [ragged.rows(batch.batch[name]) for name in ("prompts", "responses", "response_mask")]
    return [
        (tokenizer.decode(p), list(zip(tokenizer.convert_ids_to_tokens(r.tolist()), m.tolist(), strict=True)))
        for p, r, m in zip(*columns, strict=True)
    ]


@pytest.mark.parametrize("template", [MARKED, WITH_PROMPT])
def test_a_conversation_that_the_template_refuses(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    tokenizer.chat_template = refuses + template
    rows = [{"messages": TWO_TURNS}, {"messages": [{"role": "system", "content": "1"}, *TWO_TURNS]}]
    with pytest.raises(ConfigError, match="row 1: the chat template refuses it: no system role"):
        ConversationDataset(SFTDataConfig(), write(tmp_path / "a.jsonl", rows), tokenizer)


@pytest.mark.parametrize("response", [["3"], {"text": "3"}])
def test_a_response_that_is_no_text(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, response: object
) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "1+2=", "response": response}])
    with pytest.raises(ConfigError, match="response must be text, not"):
        ConversationDataset(SFTDataConfig(), path, tokenizer)


def test_one_turn(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(
        tmp_path / "a.jsonl", [{"prompt": "1+2=", "response": "3"}, {"prompt": "17+25=", "response": "042"}]
    )
    batch = ConversationDataset(SFTDataConfig(), path, tokenizer).batch([1, 0])
    assert texts(batch, tokenizer) == [
        ("17+25=", [("0", 1), ("4", 1), ("2", 1), (END, 1)]),
        ("1+2=", [("3", 1), (END, 1)]),
    ]


@pytest.mark.parametrize("template", [WITH_PROMPT, MARKED])
def test_every_assistant_turn_and_nothing_else_is_trained(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    tokenizer.chat_template = template
    path = write(tmp_path / "a.jsonl", [{"messages": TWO_TURNS}])
    ((prompt, response),) = texts(ConversationDataset(SFTDataConfig(), path, tokenizer).batch([0]), tokenizer)
    assert prompt == "1+2="
    assert [(t, m) for t, m in response if t != " "] == [
        ("3", 1), (END, 1), ("4", 0), ("+", 0), ("5", 0), ("=", 0), ("9", 1), (END, 1),
    ]  # fmt: skip
    # The template adds a space after the end token.
    assert all(mask == 0 for token, mask in response if token == " ")


def test_prompt_and_response_may_be_inside_a_column(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    row = {"asked": [{"role": "user", "content": "1+2="}], "extra": {"reply": {"text": "3"}}}
    path = write(tmp_path / "a.jsonl", [row])
    config = SFTDataConfig(prompt_key="asked", prompt_dict_keys=["content"], response_key="extra")
    config.response_dict_keys = ["reply", "text"]
    batch = ConversationDataset(config, path, tokenizer).batch([0])
    assert texts(batch, tokenizer) == [("1+2=", [("3", 1), (END, 1)])]
    config.response_dict_keys = ["reply", "txt"]
    with pytest.raises(ConfigError, match="row 0: column extra has nothing under txt; it has text"):
        ConversationDataset(config, path, tokenizer)


CALLS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}={{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ call['arguments'] | length }}{% endfor %}<|end|>"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
"""Writes how many arguments each call has."""


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_calls_of_tools_have_their_own_arguments(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, ending: str
) -> None:
    """Parquet gives each call the arguments of all others; and a call needs no text."""
    tokenizer.chat_template = CALLS
    calls: list[dict[str, Any]] = [{"a": 1}, {"b": 1, "c": {"d": 2}}, {}]
    rows = [
        {
            "messages": [
                TWO_TURNS[0],
                {"role": "assistant", "tool_calls": [{"arguments": one}]},
                *TWO_TURNS[2:],
            ]
        }
        for one in calls
    ]
    file = tmp_path / f"a.{ending}"
    write_rows(file, rows) if ending == "parquet" else write(file, rows)
    data = ConversationDataset(SFTDataConfig(), file, tokenizer)
    said = [[token for token, mask in row if mask][0] for _, row in texts(data.batch([0, 1, 2]), tokenizer)]
    assert said == ["1", "2", "0"]


@pytest.mark.parametrize("columns", [("tools", "enable_thinking"), ("apis", "thinks")])
def test_a_rows_tools_and_thinking_are_the_templates(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, columns: tuple[str, str]
) -> None:
    tools = [{"type": "function", "function": {"name": "7"}}]
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}"
        "{% if enable_thinking %}8{% endif %}" + WITH_PROMPT
    )
    given = [{}, {columns[0]: tools}, {columns[1]: True}, {columns[0]: tools, columns[1]: False}]
    rows = [{"prompt": "1+2", "response": "3", columns[0]: None, **more} for more in given]
    config = SFTDataConfig(tools_key=columns[0], enable_thinking_key=columns[1])
    batch = ConversationDataset(config, write(tmp_path / "a.jsonl", rows), tokenizer).batch([0, 1, 2, 3])
    assert [prompt for prompt, _ in texts(batch, tokenizer)] == ["1+2=", "71+2=", "81+2=", "71+2="]
    config.tools_key = None
    batch = ConversationDataset(config, tmp_path / "a.jsonl", tokenizer).batch([1])
    assert texts(batch, tokenizer)[0][0] == "1+2="


def test_a_template_sees_the_keys_of_tools_in_the_rows_own_order(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    names = "{% for key in tools[0] %}{{ tools[0][key] }}{% endfor %}"
    tokenizer.chat_template = names + WITH_PROMPT
    rows = [{"prompt": "1", "response": "3", "tools": [dict(keys)]} for keys in (["a7", "b8"], ["b8", "a7"])]
    batch = ConversationDataset(SFTDataConfig(), write(tmp_path / "a.jsonl", rows), tokenizer).batch([0, 1])
    assert [prompt for prompt, _ in texts(batch, tokenizer)] == ["781=", "871="]


def test_a_template_that_rewrites_earlier_turns_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = (
        "{{ messages|length }}*{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}"
        "<|end|>{% endif %}{% endfor %}"
    )
    path = write(tmp_path / "a.jsonl", [{"messages": TWO_TURNS[:2]}, {"messages": TWO_TURNS}])
    with pytest.raises(
        ConfigError, match="row 0: message 1: the chat template renders the conversation up to it differently"
    ):
        ConversationDataset(SFTDataConfig(), path, tokenizer)


def test_messages_are_used_where_a_file_has_them(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    first = write(tmp_path / "a.jsonl", [{"messages": TWO_TURNS[:2], "prompt": "9", "response": "9"}])
    second = write(tmp_path / "b.jsonl", [{"prompt": [{"role": "user", "content": "7"}], "response": 8}])
    batch = ConversationDataset(SFTDataConfig(), [first, second], tokenizer).batch([0, 1])
    assert [prompt for prompt, _ in texts(batch, tokenizer)] == ["1+2", "7"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1"}, "row 0: has no value in column response; it has prompt"),
        ({"messages": None, "note": "x"}, "row 0: has no value in column messages; it has note"),
        ({"messages": TWO_TURNS[:1]}, "row 0: has no assistant message"),
        ({"messages": TWO_TURNS[1:]}, "row 0: starts with the assistant"),
    ],
)
def test_bad_rows_are_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ConversationDataset(SFTDataConfig(), write(tmp_path / "a.jsonl", [row]), tokenizer)


@pytest.fixture
def long(tmp_path: Path) -> Path:
    return write(
        tmp_path / "a.jsonl", [{"prompt": "1+2=", "response": "3"}, {"prompt": "11+22+33=", "response": "66"}]
    )


def test_overlong_conversations_are_errors(long: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match="row 1: has 12 tokens, more than data.max_length=10") as caught:
        ConversationDataset(SFTDataConfig(max_length=10), long, tokenizer)
    assert "data.max_length=12" in str(caught.value)


@pytest.mark.parametrize(
    ("side", "expected"),
    [("left", ("+22+33=", [("6", 1), ("6", 1), (END, 1)])), ("right", ("11+22+33=", [("6", 1)]))],
)
def test_truncation(
    long: Path, tokenizer: PreTrainedTokenizerFast, side: str, expected: tuple[str, list[tuple[str, int]]]
) -> None:
    dataset = ConversationDataset(SFTDataConfig(max_length=10, truncation=side), long, tokenizer)
    assert texts(dataset.batch([1]), tokenizer) == [expected]


def test_what_truncation_leaves_untrained_is_left_out(
    long: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert len(ConversationDataset(SFTDataConfig(max_length=9, truncation="right"), long, tokenizer)) == 1
    assert "dropped 1 of 2 conversations" in caplog.text
    with pytest.raises(
        ConfigError, match="none of the 2 conversations has a trained token within data.max_length"
    ):
        ConversationDataset(SFTDataConfig(max_length=3, truncation="right"), long, tokenizer)


def test_a_prompt_has_at_least_one_token(long: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    dataset = ConversationDataset(SFTDataConfig(max_length=2, truncation="left"), long, tokenizer)
    # Nothing predicts the first token, so it is not trained.
    assert texts(dataset.batch([1]), tokenizer) == [("6", [(END, 1)])]
