"""Text in columns: lines fit, words are whole, nothing is lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydraflow.system.columns import output_width, paragraph, table

WORD = st.text("abc=./-_", min_size=1, max_size=12)
CELL = st.lists(WORD, max_size=6).map(" ".join)


def test_a_table_by_hand() -> None:
    rows = [["name", "n"], ["a long name", "7"]]
    assert table(rows, 80, right=[1]) == ["  name         n", "  -----------  -", "  a long name  7"]
    assert table(rows, 12) == ["  name     n", "  -------  -", "  a long   7", "  name"]


@given(st.lists(st.tuples(CELL, CELL, CELL), min_size=2, max_size=6), st.integers(50, 120))
def test_words_are_whole_and_lines_fit(rows: list[tuple[str, str, str]], width: int) -> None:
    lines = table(rows, width)
    assert max(map(len, lines)) <= width, "three words of 12 fit 50 columns"
    shown, given = Counter(" ".join(lines).split()), Counter(" ".join(map(" ".join, rows)).split())
    assert given <= shown and [set(word) for word in (shown - given).elements()] == [{"-"}] * 3, "the rule"
    assert all(line == line.rstrip() for line in lines)


@given(CELL, st.integers(20, 60))
def test_a_paragraph_keeps_its_words(text: str, width: int) -> None:
    lines = paragraph(text, width)
    assert " ".join(lines).split() == text.split()
    assert max(map(len, lines)) <= width


def test_a_word_longer_than_the_width_has_a_line_of_its_own() -> None:
    assert paragraph("see /a/very/long/path here", 12) == ["  see", "    /a/very/long/path", "    here"]


def test_the_width_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "73")
    assert output_width() == 73
