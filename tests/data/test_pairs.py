"""Pairs of responses: the forms of files, which tokens are compared, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from hydraflow.data.config import GradedPairsConfig, PairsConfig
from hydraflow.data.pairs import PairDataset, ScoredPairDataset
from hydraflow.errors import ConfigError
from hydraflow.models.config import ModelSourceConfig
from hydraflow.models.loading import load_tokenizer
from hydraflow.protocol.batch import DataProto


@pytest.fixture(scope="module")
def tokenizer(tiny: str) -> Any:
    return load_tokenizer(ModelSourceConfig(path=tiny))


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(batch: DataProto, tokenizer: Any) -> list[tuple[str, str, str]]:
    """Prompt, response and what of it counts, of every row."""
    found = []
    columns = (batch.get(name).unbind() for name in ("prompts", "responses", "response_mask"))
    for prompt, response, mask in zip(*columns, strict=True):
        parts = (prompt, response, response[mask.bool()])
        found.append(tuple(tokenizer.decode(part, skip_special_tokens=True) for part in parts))
    return found


def said(*turns: str, system: str = "") -> list[dict]:
    roles = ("user", "assistant")
    first = [{"role": "system", "content": system}] if system else []
    return [*first, *({"role": roles[i % 2], "content": text} for i, text in enumerate(turns))]


PLAIN = {"prompt": "1+1=", "chosen": "2", "rejected": "11"}
FORMS = {
    "texts": PLAIN,
    "messages": PLAIN | {"prompt": said("1+1="), "chosen": said("", "2")[1:], "rejected": said("", "11")[1:]},
    "two conversations": {"chosen": said("1+1=", "2"), "rejected": said("1+1=", "11")},
    "two conversations and the prompt": {
        "prompt": said("1+1="),
        "chosen": said("1+1=", "2"),
        "rejected": said("1+1=", "11"),
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_file_gives_the_same_rows(form: str, tokenizer: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", PLAIN, FORMS[form])
    batch = PairDataset(PairsConfig(), file, tokenizer).batch([1, 0])
    assert texts(batch, tokenizer) == [("1+1=", "2", "2"), ("1+1=", "11", "11")] * 2
    assert batch.get("group").tolist() == [0, 0, 1, 1]


def test_only_what_differs_is_compared(tokenizer: Any, tmp_path: Path) -> None:
    """A turn that both conversations share is part of the prompt, although it is the assistant's."""
    row = {side: said("1+1=", "2", "3+3=", last) for side, last in (("chosen", "6"), ("rejected", "33"))}
    batch = PairDataset(PairsConfig(), write(tmp_path / "a.jsonl", row), tokenizer).batch([0])
    assert [counted for _, _, counted in texts(batch, tokenizer)] == ["6", "33"]


@pytest.mark.parametrize("longer", ["chosen", "rejected"])
def test_one_conversation_may_continue_the_other(longer: str, tokenizer: Any, tmp_path: Path) -> None:
    """The last turn of the shorter one counts on both sides, where it changes nothing; others do not."""
    turns = ["1+1=", "2", "3+3=", "6"]
    row = {"chosen": said(*turns), "rejected": said(*turns), longer: said(*turns, "4+4=", "8")}
    batch = PairDataset(PairsConfig(), write(tmp_path / "a.jsonl", row), tokenizer).batch([0])
    counted = [counted for _, _, counted in texts(batch, tokenizer)]
    assert counted == (["68", "6"] if longer == "chosen" else ["6", "68"])


def test_a_response_without_an_end_token_may_begin_the_other(tokenizer: Any, tmp_path: Path) -> None:
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    row = {"prompt": "1=", "chosen": "12", "rejected": "1"}
    for config, kind in ((PairsConfig(), PairDataset), (GradedPairsConfig(), ScoredPairDataset)):
        batch = kind(config, write(tmp_path / "a.jsonl", row), plain).batch([0])
        assert [response for _, response, _ in texts(batch, plain)] == ["12", "1"]
    with pytest.raises(ConfigError, match="chosen and rejected are the same"):
        PairDataset(PairsConfig(), write(tmp_path / "b.jsonl", row | {"chosen": "1"}), plain)


def test_rows_of_a_reward_model_end_with_a_place_for_the_score(tokenizer: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", PLAIN | {"margin": 2})
    plain = PairDataset(PairsConfig(), file, tokenizer).batch([0])
    scored = ScoredPairDataset(GradedPairsConfig(), file, tokenizer).batch([0])
    assert "margin" not in plain.keys() and scored.get("margin").tolist() == [2.0, 2.0]
    for short, long, mask in zip(
        *(batch.get("responses").unbind() for batch in (plain, scored)), scored.get("response_mask").unbind()
    ):
        assert long[:-1].tolist() == short.tolist()
        assert mask.tolist() == [0] * len(short) + [1]


LONG = {"prompt": "12345+1=", "chosen": "2", "rejected": "1111"}


def test_both_responses_follow_the_same_prompt_however_they_are_cut(tokenizer: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", LONG)
    for side, expected in {"left": "5+1=", "right": "12345+1="}.items():
        config = PairsConfig(max_length=9, truncation=side)
        found = texts(PairDataset(config, file, tokenizer).batch([0]), tokenizer)
        assert [prompt for prompt, _, _ in found] == [expected] * 2
    assert [counted for _, _, counted in found] == ["2", "1"]


@pytest.mark.parametrize(
    ("side", "message"),
    [
        ("left", "a response would lose its beginning"),
        ("right", "chosen and rejected are the same once they"),
    ],
)
def test_a_pair_that_a_cut_would_spoil_is_named(
    side: str, message: str, tokenizer: Any, tmp_path: Path
) -> None:
    file = write(tmp_path / "a.jsonl", PLAIN, {"prompt": "1+1=", "chosen": "222", "rejected": "223333"})
    config = PairsConfig(max_length=6, truncation=side)
    with pytest.raises(ConfigError, match="row 1") as caught:
        PairDataset(config, file, tokenizer)
    assert message in str(caught.value) and "a larger data.max_length" in str(caught.value)


def assert_scored_at_the_end_tokens(tokenizer: Any, folder: Path) -> None:
    batch = ScoredPairDataset(GradedPairsConfig(), write(folder / "a.jsonl", PLAIN), tokenizer).batch([0])
    two, one = (tokenizer.convert_tokens_to_ids(text) for text in "21")
    end = tokenizer.eos_token_id
    assert [row.tolist() for row in batch.get("responses").unbind()] == [[two, end, 0], [one, one, end, 0]]


def test_a_score_is_that_of_the_last_token_that_a_model_samples(tokenizer: Any, tmp_path: Path) -> None:
    """Many templates write a line break after the end token."""
    spaced = copy.deepcopy(tokenizer)
    spaced.chat_template = spaced.chat_template.replace("<|end|>", "<|end|> ")
    assert_scored_at_the_end_tokens(spaced, tmp_path)


def test_nothing_after_the_end_token_is_scored(tokenizer: Any, tmp_path: Path) -> None:
    """Phi-3's template closes a conversation with a second control token."""
    closed = copy.deepcopy(tokenizer)
    closed.add_special_tokens({"additional_special_tokens": ["<|endoftext|>"]})
    closed.chat_template += "{% if not add_generation_prompt %} <|endoftext|>{% endif %}"
    assert_scored_at_the_end_tokens(closed, tmp_path)


def test_a_response_that_ends_in_a_control_token_keeps_its_end_token(tokenizer: Any, tmp_path: Path) -> None:
    calling = copy.deepcopy(tokenizer)
    calling.add_special_tokens({"additional_special_tokens": ["<|call|>"]})
    row = PLAIN | {"chosen": "2<|call|>"}
    batch = ScoredPairDataset(GradedPairsConfig(), write(tmp_path / "a.jsonl", row), calling).batch([0])
    ids = [calling.convert_tokens_to_ids(text) for text in ("2", "<|call|>")]
    assert batch.get("responses").unbind()[0].tolist() == [*ids, calling.eos_token_id, 0]


@pytest.mark.parametrize(
    ("prompt", "system", "prompts"),
    [
        (said("1+1="), "-", "-1+1="),
        (said("1+1= ", system="-"), "", "-1+1="),
        (said("1+1=", system="-"), "+", "+1+1="),
        (said(system="-"), "", "-1+1="),
        (said(system="-"), "-", "-1+1="),
    ],
)
def test_a_prompt_that_both_conversations_repeat_stands_once(
    prompt: list[dict], system: str, prompts: str, tokenizer: Any, tmp_path: Path
) -> None:
    row = {"prompt": prompt, "chosen": said("1+1=", "2", system=system)}
    row["rejected"] = said("1+1=", "11", system=system)
    batch = PairDataset(PairsConfig(), write(tmp_path / "a.jsonl", row), tokenizer).batch([0])
    assert texts(batch, tokenizer) == [(prompts, "2", "2"), (prompts, "11", "11")]


WHOLE = "column chosen is a whole conversation, but not one that begins with prompt"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (PLAIN | {"chosen": said("2+2=", "4"), "rejected": said("2+2=", "22")}, WHOLE),
        (PLAIN | {"chosen": said("2+2=", "4", system="-")}, WHOLE),
        (PLAIN | {"rejected": "2"}, "chosen and rejected are the same"),
        ({"prompt": "1+1=", "chosen": "2"}, "no value in column rejected"),
        ({"chosen": "2", "rejected": "3"}, "no value in column prompt"),
        (PLAIN | {"chosen": 2}, "column chosen must be a string or a list of messages"),
        (PLAIN | {"chosen": said("", "2", "?")[1:]}, "must end with the assistant's message"),
        (PLAIN | {"margin": "much"}, "column margin must be a finite number, not 'much'"),
        (PLAIN | {"margin": None}, "no value in column margin"),
    ],
)
def test_a_row_that_is_no_pair_is_named(row: dict, message: str, tokenizer: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", PLAIN | {"margin": 1.0}, row)
    with pytest.raises(ConfigError, match="row 1") as caught:
        ScoredPairDataset(GradedPairsConfig(), file, tokenizer)
    assert message in str(caught.value)
