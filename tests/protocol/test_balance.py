"""Shares for ranks and micro-batches under a token budget."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from protocol.samples import laws

from hydraflow.protocol.balance import equal_size_partitions, token_bins


def loads(bins: list[list[int]], lengths: list[int]) -> list[int]:
    return [sum(lengths[row] for row in rows) for rows in bins]


@laws
@given(st.integers(1, 6), st.integers(0, 8), st.data())
def test_partitions_hold_every_row_once_in_equal_numbers(k: int, each: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 50), min_size=k * each, max_size=k * each))
    parts = equal_size_partitions(lengths, k)
    assert sorted(row for rows in parts for row in rows) == list(range(k * each))
    assert [len(rows) for rows in parts] == [each] * k
    assert all(rows == sorted(rows) for rows in parts)
    if each:  # dealing back and forth alone keeps the parts within one row of the longest
        assert max(loads(parts, lengths)) - min(loads(parts, lengths)) <= max(lengths)


def test_partitions_of_known_lengths() -> None:
    assert loads(equal_size_partitions([8, 7, 6, 5, 4, 3, 2, 1], 2), [8, 7, 6, 5, 4, 3, 2, 1]) == [18, 18]
    assert sorted(loads(equal_size_partitions([10, 1, 1, 1, 1, 1], 3), [10, 1, 1, 1, 1, 1])) == [2, 2, 11]
    assert (
        equal_size_partitions(torch.tensor([3, 3]), 2)
        == equal_size_partitions(np.array([3, 3], dtype=np.uint8), 2)
        == [[0], [1]]
    )


def test_a_swap_repairs_what_dealing_leaves() -> None:
    lengths = [100, 60, 41, 40, 39, 20]
    # dealt: 100 + 40 + 39 = 179 and 60 + 41 + 20 = 121; swapping 40 for 20 gives 159 and 141, and no three
    # rows with 100 are lighter
    assert equal_size_partitions(lengths, 2) == [[0, 4, 5], [1, 2, 3]]


def test_partitions_need_divisible_rows() -> None:
    with pytest.raises(ValueError, match="5 rows do not divide into 2 parts"):
        equal_size_partitions([1] * 5, 2)


@laws
@given(st.lists(st.integers(0, 20), max_size=20), st.integers(20, 60), st.integers(1, 12))
def test_bins_hold_every_row_once_under_the_budget(lengths: list[int], budget: int, min_bins: int) -> None:
    bins = token_bins(lengths, budget, min_bins)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(rows and rows == sorted(rows) for rows in bins)
    assert all(load <= budget for load in loads(bins, lengths))
    assert len(bins) == max(len(token_bins(lengths, budget)), min(min_bins, len(lengths)))
    assert bins == token_bins(np.array(lengths, dtype=np.int64), budget, min_bins)


@laws
@given(st.lists(st.integers(1, 20), min_size=1, max_size=20), st.integers(20, 60))
def test_bins_are_at_most_twice_as_many_as_their_tokens_fill(lengths: list[int], budget: int) -> None:
    # a bin is opened only for a row that fits nowhere, so two bins hold more than one budget; rows of 11 of
    # 20 come close to it
    assert len(token_bins(lengths, budget)) <= 2 * -(-sum(lengths) // budget)


def test_bins_of_known_lengths() -> None:
    assert token_bins([4, 4, 4, 4], 8) == [[0, 2], [1, 3]]
    assert token_bins([11] * 20, 20) == [[row] for row in range(20)]
    assert token_bins([], 10) == [] and token_bins([], 10, min_bins=3) == []
    assert token_bins([0, 0, 5], 10, min_bins=3) == [[0], [1], [2]]
    assert token_bins([1, 1], 10, min_bins=5) == [[0], [1]]


def test_a_row_above_the_budget_is_named() -> None:
    with pytest.raises(ValueError, match="row 1 has 11 tokens, more than the 10"):
        token_bins([3, 11], 10)


def test_a_hundred_thousand_rows() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, 100_000).astype(np.int64)
    began = time.process_time()
    parts = equal_size_partitions(lengths, 8)
    bins = token_bins(lengths, 65_536)
    assert time.process_time() - began < 5  # about 0.15 s; a quadratic method takes minutes
    totals = [int(lengths[rows].sum()) for rows in parts]
    assert max(totals) - min(totals) <= 10
    assert len(bins) <= 1.01 * lengths.sum() / 65_536 + 1
