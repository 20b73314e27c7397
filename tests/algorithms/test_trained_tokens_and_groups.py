"""Sums under a mask, trained tokens, and statistics over groups: by hand, and what is outside a mask."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydraflow.algorithms.groups import Groups
from hydraflow.algorithms.samples import Samples
from hydraflow.algorithms.token_terms import keep
from hydraflow.algorithms.trained_tokens import TrainedTokens, row_sums, whiten

NAN = float("nan")


def test_what_a_mask_keeps_by_hand():
    values = torch.tensor([[1.0, NAN, 3.0], [8.0, float("inf"), 0.0]], dtype=torch.float64)
    assert keep(values, torch.tensor([[1, 0, 1], [1, 0, 0]])).sum().item() == 12.0


def test_no_gradient_and_no_nan_pass_a_closed_mask():
    values = torch.tensor([2.0, NAN], requires_grad=True)
    (keep(values, torch.tensor([1, 0])) ** 2).sum().backward()
    assert values.grad.tolist() == [4.0, 0.0]


def test_trained_tokens_by_hand():
    """Rows of 2, 0, 4 and 1 tokens, of which 1, 0, 3 and 1 are trained."""
    mask, lengths = torch.tensor([0, 1, 1, 0, 1, 1, 1]), torch.tensor([2, 0, 4, 1])
    tokens = TrainedTokens(mask, lengths)
    assert tokens.lengths.tolist() == [1, 0, 3, 1]
    column = torch.tensor([NAN, 1.0, 2.0, NAN, 3.0, 4.0, 5.0])
    assert tokens.of(column).tolist() == [1, 2, 3, 4, 5]
    assert tokens.put_back(tokens.of(column)).tolist() == [0, 1, 2, 0, 3, 4, 5]
    assert tokens.following(tokens.of(column)).tolist() == [0, 3, 4, 0, 0]
    assert tokens.discounted(tokens.of(column), 0.5).tolist() == [1, 2 + 1.5 + 1, 3 + 2, 4, 5]


def test_no_rows_and_rows_without_tokens():
    for mask, lengths in (([], []), ([0, 0, 0], [1, 2])):
        tokens = TrainedTokens(torch.tensor(mask), torch.tensor(lengths, dtype=torch.int64))
        assert tokens.discounted(torch.tensor([]), 0.5).tolist() == []
        assert tokens.following(torch.tensor([])).tolist() == []


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([0, 1, 2, 63, 64, 65, 128, 200, 5000]), max_size=6),
    st.sampled_from([0.0, 0.5, 0.95, 0.999, 1.0]),
    st.integers(0, 5),
)
def test_discounting_is_the_loop_over_time(trained, factor, seed):
    """Rows within one block, at its end, over many blocks, and over blocks of blocks; every other token is
    masked out. With one factor, and with another one for each token."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([2 * n for n in trained], dtype=torch.int64)
    tokens = TrainedTokens(torch.tensor([0, 1] * sum(trained)), lengths)
    values = torch.randn(sum(trained), generator=draw, dtype=torch.float64)
    drawn = factor * (1 - 0.1 * torch.rand(sum(trained), generator=draw, dtype=torch.float64))
    for used, factors in ((factor, torch.full_like(drawn, factor)), (drawn, drawn)):
        expected = []
        for row, of_row in zip(values.split(trained), factors.split(trained)):
            later, found = 0.0, []
            for value, of_token in zip(reversed(row.tolist()), reversed(of_row.tolist())):
                later = value + of_token * later
                found.append(later)
            expected += reversed(found)
        wanted = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(tokens.discounted(values, used), wanted, atol=1e-10, rtol=1e-10)
        found = tokens.discounted(values.float(), used).double()
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


def test_row_sums_are_in_float64():
    tenths = torch.full((100_000,), 0.1)
    expected = [float(tenths[0]) * 99_999, 0, float(tenths[0])]
    assert row_sums(tenths, torch.tensor([99_999, 0, 1])).tolist() == pytest.approx(expected, rel=1e-12)


def test_whitening_by_hand():
    white = whiten(torch.tensor([1.0, 3.0, 8.0], dtype=torch.float64), eps=0.0)
    variance = 13  # ((-3)^2 + (-1)^2 + 4^2) / 2
    assert white.tolist() == pytest.approx([x / math.sqrt(variance) for x in (-3, -1, 4)], abs=1e-12)
    assert whiten(torch.tensor([5.0])).tolist() == [0.0]
    assert whiten(torch.tensor([])).tolist() == []
    assert whiten(torch.full((1001,), 0.7)).tolist() == [0.0] * 1001


@pytest.mark.parametrize("score", [0.05, 0.1, 0.7])
def test_samples_whose_rows_all_have_the_same_score_tie(score):
    rows = torch.tensor([0, 1, 1, 1, 1, 1, 1, 1])
    means = Samples.of(torch.zeros(8, dtype=torch.int64), rows).mean(torch.full((8,), score))
    assert means.tolist() == torch.full((2,), score).tolist()


def test_groups_by_hand():
    scores = torch.tensor([1.0, 10.0, 3.0, 7.0, 20.0], dtype=torch.float64)
    groups = Groups(torch.tensor([4, -1, 4, 99, -1]))
    assert groups.centred(scores).tolist() == [-1.0, -5.0, 1.0, 0.0, 5.0]
    assert groups.std(scores).tolist() == pytest.approx(
        [math.sqrt(2), math.sqrt(50), math.sqrt(2), 0.0, math.sqrt(50)]
    )
    assert groups.size.tolist() == [2, 2, 2, 1, 2]


@pytest.mark.parametrize("score", [0.1, 0.7, -3.3, 1e6 + 0.1])
def test_equal_scores_of_a_group_differ_by_exactly_nothing(score):
    groups, scores = Groups(torch.zeros(7, dtype=torch.int64)), torch.full((7,), score)
    assert groups.centred(scores).tolist() == [0.0] * 7
    assert groups.std(scores).tolist() == [0.0] * 7


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-10, 10)), min_size=1, max_size=12))
def test_groups_agree_with_a_loop(rows):
    ids, scores = [i for i, _ in rows], [s for _, s in rows]
    groups, column = Groups(torch.tensor(ids)), torch.tensor(scores, dtype=torch.float64)
    centred, std = groups.centred(column), groups.std(column)
    for row, (i, score) in enumerate(rows):
        members = [s for j, s in rows if j == i]
        mean = sum(members) / len(members)
        assert centred[row].item() == pytest.approx(score - mean, abs=1e-10)
        variance = sum((s - mean) ** 2 for s in members) / max(len(members) - 1, 1)
        assert std[row].item() == pytest.approx(math.sqrt(variance), abs=1e-10)
