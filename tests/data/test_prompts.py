"""Prompts: tokens, row objects, overlong prompts, and what is refused."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.test_conversations import write
from known_columns import assert_as_documented
from transformers import PreTrainedTokenizerFast

from hydraflow.data.config import DataConfig, GenerateDataConfig
from hydraflow.data.files import write_rows
from hydraflow.data.prompts import PromptDataset, truncate
from hydraflow.errors import ConfigError
from hydraflow.protocol import ragged

PROMPTS = ["17+25=", "1+2=", "100+200="]


def row(prompt: Any, source: str = "arithmetic", **more: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "data_source": source,
        "reward_model": {"style": "rule", "ground_truth": "042"},
        **more,
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [row([{"role": "user", "content": p}], extra_info={"index": i}) for i, p in enumerate(PROMPTS)]
    write_rows(tmp_path / "train.parquet", rows)
    return tmp_path / "train.parquet"


def test_batch_holds_tokens_and_objects_in_the_asked_order(
    file: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    dataset = PromptDataset(DataConfig(max_prompt_length=8), file, tokenizer)
    batch = dataset.batch([1, 0])
    assert_as_documented(batch)
    # "1+2=" and "17+25=": the digit d has id d + 2, "+" is 12 and "=" is 15.
    assert [r.tolist() for r in ragged.rows(batch.batch["prompts"])] == [[3, 12, 4, 15], [3, 9, 12, 4, 7, 15]]
    objects = batch.non_tensor_batch
    assert objects["uid"].tolist() == ["1", "0"]
    assert objects["raw_prompt"].tolist() == [
        [{"role": "user", "content": "1+2="}],
        [{"role": "user", "content": "17+25="}],
    ]
    assert objects["reward_model"][0] == {"style": "rule", "ground_truth": "042"}
    assert objects["extra_info"].tolist() == [{"index": 1}, {"index": 0}]
    assert dataset.data_sources() == ["arithmetic"]


def test_generation_prompt_and_template_variables_are_used(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = (
        "{{ messages[0]['content'] }}{% if add_generation_prompt %}={{ extra }}{% endif %}"
    )
    config = DataConfig(apply_chat_template_kwargs={"extra": "7"})
    dataset = PromptDataset(config, write(tmp_path / "a.jsonl", [row("1")]), tokenizer)
    assert ragged.rows(dataset.batch([0]).batch["prompts"])[0].tolist() == [3, 15, 9]


def test_filter_leaves_out_overlong_prompts_and_says_how_many(
    file: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        dataset = PromptDataset(
            DataConfig(max_prompt_length=6, filter_overlong_prompts=True), file, tokenizer
        )
    assert dataset.batch(np.arange(2)).non_tensor_batch["uid"].tolist() == ["0", "1"] and len(dataset) == 2
    assert "dropped 1 of 3 prompts with more than 6 tokens" in caplog.text
    with pytest.raises(ConfigError, match="all 3 prompts are longer than data.max_prompt_length=2"):
        PromptDataset(DataConfig(max_prompt_length=2, filter_overlong_prompts=True), file, tokenizer)


def test_truncation_error_names_file_row_length_and_limit(
    file: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ConfigError) as caught:
        PromptDataset(DataConfig(max_prompt_length=6), file, tokenizer)
    (problem,) = caught.value.problems
    assert problem.field == f"{file} row 2"
    assert problem.rule == "the prompt has 8 tokens, more than data.max_prompt_length=6"
    assert "data.max_prompt_length=8" in problem.remedy


@pytest.mark.parametrize(
    ("side", "kept"), [("left", [4, 2, 2, 15]), ("right", [3, 2, 2, 12]), ("middle", [3, 2, 2, 15])]
)
def test_truncation_cuts_the_named_part(
    file: Path, tokenizer: PreTrainedTokenizerFast, side: str, kept: list[int]
) -> None:
    dataset = PromptDataset(DataConfig(max_prompt_length=4, truncation=side), file, tokenizer)
    assert ragged.rows(dataset.batch([2]).batch["prompts"])[0].tolist() == kept  # of 100+200=


def test_truncate_middle_of_odd_limit_keeps_the_longer_tail() -> None:
    assert truncate([1, 2, 3, 4, 5], 1, "middle") == [5]


def test_several_data_sources_in_one_file(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "val.jsonl", [row("1+1="), row("2+2=", "openai/gsm8k")])
    dataset = PromptDataset(DataConfig(), path, tokenizer, key="data.val_files")
    assert dataset.data_sources() == ["arithmetic", "openai/gsm8k"]
    assert dataset.batch([0, 1]).non_tensor_batch["data_source"].tolist() == ["arithmetic", "openai/gsm8k"]


def test_the_source_column_can_be_chosen(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "a.jsonl", [row("1", kind="aime24")])
    assert PromptDataset(DataConfig(reward_fn_key="kind"), path, tokenizer).data_sources() == ["aime24"]


def test_prompts_for_generation_need_no_reward_columns(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "1+1=", "note": "kept"}])
    dataset = PromptDataset(GenerateDataConfig(), path, tokenizer)
    assert dataset.records[0].values["note"] == "kept"
    assert set(dataset.batch([0]).non_tensor_batch) == {"uid", "extra_info", "raw_prompt"}
    with pytest.raises(
        ConfigError, match="row 0: has no value in column data_source, reward_model; it has prompt, note"
    ) as refused:
        PromptDataset(DataConfig(), path, tokenizer)
    remedy = "data.reward_fn_key=<one of its columns> and write a column reward_model"
    assert [problem.remedy for problem in refused.value.problems] == [remedy]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row("1") | {"reward_model": {"style": "rule"}}, "row 1: column reward_model must hold"),
        (row(7), "row 1: column prompt must be a string or a list of messages"),
        (row([]), "row 1: column prompt must be"),
        (row([{"role": "user"}]), "row 1: column prompt must be"),
        (row([{"role": "user", "content": 5}]), "row 1: column prompt must be"),
        (
            row([{"role": "user", "content": [{"type": "text", "text": "1"}]}]),
            "row 1: column prompt must be .* a text as content",
        ),
        (row(""), "row 1: the chat template renders it to no tokens"),
    ],
)
def test_bad_rows_are_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, bad: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PromptDataset(DataConfig(), write(tmp_path / "a.jsonl", [row("1"), bad]), tokenizer)


def test_a_row_that_the_template_refuses_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{"
        " messages[0]['content'] }}"
    )
    path = write(tmp_path / "a.jsonl", [row("1"), row([{"role": "tool", "content": "1"}])])
    with pytest.raises(ConfigError, match="row 1: the chat template refuses it: no tools"):
        PromptDataset(DataConfig(), path, tokenizer)


def test_a_template_that_cannot_compute_is_no_stack_trace(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = "{{ messages[0]['content'] + depth }}"
    path = write(tmp_path / "a.jsonl", [row("1")])
    with pytest.raises(ConfigError, match="row 0: the chat template refuses it: can only concatenate str"):
        PromptDataset(DataConfig(apply_chat_template_kwargs={"depth": 3}), path, tokenizer)


def test_values_that_json_cannot_carry_are_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    write_rows(tmp_path / "a.parquet", [row("1", extra_info={"when": datetime.date(2024, 1, 1)})])
    with pytest.raises(ConfigError, match="row 0: extra_info cannot be written as JSON"):
        PromptDataset(DataConfig(), tmp_path / "a.parquet", tokenizer)
