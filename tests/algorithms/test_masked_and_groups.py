"""Masked statistics and statistics over groups: values computed by hand, and what stands outside a mask."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydraflow.algorithms.groups import group_ids, group_scores
from hydraflow.algorithms.masked import keep, masked_mean, masked_sum, masked_whiten

NAN = float("nan")


def test_masked_statistics_by_hand():
    values = torch.tensor([[1.0, NAN, 3.0], [8.0, float("inf"), 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1], [1, 0, 0]])
    assert masked_sum(values, mask).item() == 12.0
    assert masked_mean(values, mask).item() == 4.0
    assert masked_mean(values, mask, dim=1).tolist() == [2.0, 8.0]
    white = masked_whiten(values, mask, eps=0.0)  # variance 13 = ((-3)^2 + (-1)^2 + 4^2) / 2
    assert white.dtype == torch.float64
    assert torch.allclose(
        white * math.sqrt(13), torch.tensor([[-3.0, 0, -1], [4, 0, 0]], dtype=torch.float64), atol=1e-12
    )


@pytest.mark.parametrize("trained", [0, 1])
def test_whitening_none_or_one_token_gives_zeros(trained):
    mask = torch.zeros(2, 2)
    mask[0, :trained] = 1
    assert masked_whiten(torch.full((2, 2), 5.0), mask).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert masked_mean(torch.full((2, 2), 5.0), mask).item() == 5.0 * trained


def test_padding_changes_no_bit_of_whitened_values():
    values = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(7, 33, generator=torch.Generator().manual_seed(1)) < 0.7
    wide = lambda x: torch.nn.functional.pad(x, (0, 50, 0, 3))  # noqa: E731
    assert torch.equal(masked_whiten(wide(values), wide(mask)), wide(masked_whiten(values, mask)))


def test_no_gradient_and_no_nan_pass_a_closed_mask():
    values = torch.tensor([2.0, NAN], requires_grad=True)
    (keep(values, torch.tensor([1, 0])) ** 2).sum().backward()
    assert values.grad.tolist() == [4.0, 0.0]


def test_group_ids_of_names():
    assert group_ids(["q7", "q1", "q7", "q3"]).tolist() == [2, 0, 2, 1]


def test_group_scores_by_hand():
    scores = torch.tensor([1.0, 10.0, 3.0, 7.0, 20.0], dtype=torch.float64)
    group = group_scores(scores, torch.tensor([4, -1, 4, 99, -1]))
    assert group.centred.tolist() == [-1.0, -5.0, 1.0, 0.0, 5.0]
    assert group.std.tolist() == pytest.approx(
        [math.sqrt(2), math.sqrt(50), math.sqrt(2), 0.0, math.sqrt(50)]
    )
    assert group.size.tolist() == [2, 2, 2, 1, 2]


@pytest.mark.parametrize("score", [0.1, 0.7, -3.3, 1e6 + 0.1])
def test_equal_scores_of_a_group_differ_by_exactly_nothing(score):
    group = group_scores(torch.full((7,), score), torch.zeros(7, dtype=torch.int64))
    assert group.centred.tolist() == [0.0] * 7
    assert group.std.tolist() == [0.0] * 7


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-10, 10)), min_size=1, max_size=12))
def test_group_scores_agree_with_a_loop(rows):
    ids, scores = [i for i, _ in rows], [s for _, s in rows]
    group = group_scores(torch.tensor(scores, dtype=torch.float64), torch.tensor(ids))
    for row, (i, score) in enumerate(rows):
        members = [s for j, s in rows if j == i]
        mean = sum(members) / len(members)
        assert group.centred[row].item() == pytest.approx(score - mean, abs=1e-10)
        variance = sum((s - mean) ** 2 for s in members) / max(len(members) - 1, 1)
        assert group.std[row].item() == pytest.approx(math.sqrt(variance), abs=1e-10)
