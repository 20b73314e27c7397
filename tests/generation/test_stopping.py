"""Stop strings: the token that completes one is found as by decoding the whole response again after each
token, and a response ends there as if it had been cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from generation.test_native import CONFIGS, END, VOCABULARY, make, make_request, rows
from generation.test_requests import drained, single
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hydraflow.generation.base import SamplingParams
from hydraflow.generation.native import NativeEngine
from hydraflow.generation.stopping import StopStrings
from hydraflow.protocol import ragged

E_ACUTE = "Ã", "©"
"""The bytes of é, as byte-level tokenizers write them; Ġ is a space and Ċ a new line."""
WORDS = ["<pad>", "<end>", "a", "b", "c", "ab", "bc", "abc", "Ġ", ".", ".b", "a.", *E_ACUTE]
WORDS += ["©a", "bÃ", "ĊĊ", "Ċ", "Ġa", "bcb", "c.", "d", "da"]
STOPS = "b.", "é", "\n\n\n", "ca", "<end>a"


@cache
def letters() -> PreTrainedTokenizerFast:
    """As many tokens as the small models have."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in WORDS[:2]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


def needed(tokens: Sequence[int], stops: Sequence[str] = STOPS) -> int | None:
    """How many of the tokens have a stop string as their text; bytes of a character that is not complete may
    follow no string."""
    tokenizer = letters()
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count], skip_special_tokens=False)
        if not text.endswith("�") and any(stop in text for stop in stops):
            return count
    return None


@given(
    tokens=st.lists(st.integers(0, VOCABULARY - 1), max_size=30),
    sampled=st.integers(0, 8),
    stops=st.lists(st.sampled_from([*STOPS, "a", "cab", ". a"]), min_size=1, max_size=3),
)
@example(tokens=[WORDS.index(word) for word in ("ab", "Ã", "©a", "d")], sampled=2, stops=["é"])
def test_it_is_the_token_that_decoding_everything_finds(
    tokens: list[int], sampled: int, stops: list[str]
) -> None:
    watched = StopStrings(letters().backend_tokenizer, stops, [2, 3])
    found = watched.length(tokens)
    assert found == needed(tokens, stops)
    if found is None or found > sampled:
        later = StopStrings(letters().backend_tokenizer, stops, [2, 3], tokens[:sampled])
        assert later.length(tokens[sampled:]) == (None if found is None else found - sampled)


@pytest.mark.parametrize("words", [["Ã"], ["©", "Ã"], ["a", "©", "©", "©", "©", "©", "Ã"]])
def test_the_prompt_is_no_part_of_the_response(words: list[str]) -> None:
    """Also where it ends within a character, which may then be completed."""
    prompt = [WORDS.index(word) for word in ("ab", ".", *words)]
    letter, half = WORDS.index("d"), WORDS.index("©")
    watched = StopStrings(letters().backend_tokenizer, ["b.", "é"], prompt)
    assert [watched.ends_with(token) for token in (letter, letter)] == [False, False]
    assert StopStrings(letters().backend_tokenizer, ["b.", "é"], prompt).ends_with(half)


def test_bytes_that_are_no_text_cost_no_later_string() -> None:
    """Here a byte that was a letter alone is none with the byte after it."""
    tokenizer = Tokenizer(models.WordLevel({"<0x61>": 0, "<0xC3>": 1, "b": 2, "c": 3}, unk_token="b"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert StopStrings(tokenizer, ["bc"], []).length([0, 1, 2, 3]) == 4


def test_special_tokens_are_text_also_after_bytes_that_are_none() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<0x61>": 0, "<0xC3>": 1, "b": 2}, unk_token="b"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    assert StopStrings(tokenizer, ["b<end>"], []).length([0, 1, 2, 3]) == 4


def test_the_first_words_depend_on_what_is_before_them() -> None:
    """A tokenizer of words puts a space before each but the first of a text."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "so": 1, "stop": 2}, unk_token="<unk>"))
    words.decoder = decoders.Metaspace()
    words.model = models.WordLevel({"<unk>": 0, "▁so": 1, "▁stop": 2}, unk_token="<unk>")
    assert StopStrings(words, [" stop"], [1]).ends_with(2)
    assert not StopStrings(words, [" stop"], []).ends_with(2)


@pytest.fixture(scope="module")
def engine() -> NativeEngine:
    return NativeEngine(make(CONFIGS["llama"]), max_num_seqs=20, tokenizer=letters())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_response_is_the_beginning_of_the_one_without_stop_strings(
    engine: NativeEngine, temperature: float
) -> None:
    request = make_request([3, 8, 5, 17, 1], samples=12)
    params = SamplingParams(max_tokens=24, temperature=temperature, stop_token_ids=(9,))
    free, stopped = engine.generate(request, params), engine.generate(request, replace(params, stop=STOPS))
    kept = [needed(row) or len(row) for row in rows(free)]
    assert rows(stopped) == [row[:count] for row, count in zip(rows(free), kept, strict=True)]
    for before, now, count in zip(
        ragged.rows(free.log_probs), ragged.rows(stopped.log_probs), kept, strict=True
    ):
        assert torch.equal(before[:count], now) or (before[:count] - now).abs().max() < 1e-5
    shorter = [row[-1] not in (END, 9) and len(row) < 24 for row in rows(stopped)]
    assert any(shorter) and not all(shorter)
    reasons = zip(rows(stopped), stopped.finish_reason, strict=True)
    assert all(
        (reason == "stop") == (len(row) < 24 or row[-1] in (END, 9) or bool(needed(row)))
        for row, reason in reasons
    )


def test_a_string_may_have_begun_before_an_interruption(engine: NativeEngine) -> None:
    params = SamplingParams(max_tokens=24, temperature=1.0, ignore_eos=True, stop=STOPS)
    wanted = single(make_request([3, 8, 5, 6], samples=12), params)
    engine.submit(wanted)
    whole = {name: one.tokens.tolist() for name, one in drained(engine).items()}
    left = [replace(one, sampled=tuple(whole[one.name][:-1])) for one in wanted if len(whole[one.name]) < 24]
    engine.submit(left)
    assert {name: one.tokens.tolist() for name, one in drained(engine).items()} == {
        one.name: whole[one.name][-1:] for one in left
    }
    assert len(left) > 10


def test_what_cannot_be_watched_for_is_refused() -> None:
    with pytest.raises(ValueError, match="an empty string would end every response"):
        SamplingParams(max_tokens=3, stop=("a", ""))
    engine, params = NativeEngine(make(CONFIGS["llama"])), SamplingParams(max_tokens=3, stop=("a",))
    with pytest.raises(ValueError, match=r"stop=\['a'\] needs an engine that was built with a tokenizer"):
        engine.generate(make_request([3]), params)
