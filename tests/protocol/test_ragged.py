"""Ragged columns: building them, taking them apart, selecting rows, padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from protocol.samples import laws, row_lengths, some_lengths

from hydraflow.protocol import ragged


def column(lengths: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Tokens 1, 2, 3, ... cut into rows."""
    return ragged.from_parts(
        torch.arange(1, sum(lengths) + 1).to(dtype), torch.tensor(lengths, dtype=torch.int64)
    )


def plain(t: torch.Tensor) -> list[list[float]]:
    return [row.tolist() for row in ragged.rows(t)]


def test_rows_and_parts_of_a_known_column() -> None:
    t = ragged.from_rows([torch.tensor([5, 6]), torch.tensor([], dtype=torch.int64), torch.tensor([7])])
    values, lengths = ragged.parts(t)
    assert values.tolist() == [5, 6, 7]
    assert lengths.tolist() == ragged.lengths(t).tolist() == [2, 0, 1]
    assert lengths.dtype == torch.int64
    assert ragged.is_ragged(t) and not ragged.is_ragged(values)
    assert t.shape[0] == 3


def test_lengths_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="3 values cannot have row lengths that add up to 4"):
        ragged.from_parts(torch.zeros(3), torch.tensor([2, 2]))


def test_no_rows_give_no_dtype() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        ragged.from_rows([])


def test_parts_of_a_view_with_holes_are_only_its_tokens() -> None:
    holes = torch.nested.narrow(
        torch.arange(12).view(3, 4), 1, torch.tensor([0, 1, 2]), torch.tensor([2, 3, 1]), layout=torch.jagged
    )
    values, lengths = ragged.parts(holes)
    assert values.tolist() == [0, 1, 5, 6, 7, 10]
    assert lengths.tolist() == [2, 3, 1]


@laws
@given(row_lengths, st.data())
def test_take_gives_the_named_rows(lengths: list[int], data: st.DataObject) -> None:
    t = column(lengths)
    index = data.draw(
        st.lists(st.integers(-len(lengths), len(lengths) - 1), max_size=9) if lengths else st.just([])
    )
    assert plain(ragged.take(t, index)) == [plain(t)[i] for i in index]
    assert ragged.take(ragged.lengths(t), index).tolist() == [lengths[i] for i in index]


@laws
@given(row_lengths, st.data())
def test_take_by_mask_and_by_slice(lengths: list[int], data: st.DataObject) -> None:
    t = column(lengths)
    mask = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    assert plain(ragged.take(t, np.array(mask, dtype=bool))) == [
        row for row, keep in zip(plain(t), mask) if keep
    ]
    cut = data.draw(st.slices(len(lengths)))
    assert plain(ragged.take(t, cut)) == plain(t)[cut]


def test_take_by_a_step_that_numpy_has_no_integer_for() -> None:
    assert plain(ragged.take(column([2, 1]), slice(None, None, 2**63))) == plain(column([2, 1]))[:1]


def test_take_of_long_rows_copies_whole_rows() -> None:
    t = column([600, 1, 500, 0])  # mean length above the crossing from gathering tokens to copying rows
    taken = ragged.take(t, torch.tensor([3, 2, 0, 2]))
    assert ragged.lengths(taken).tolist() == [0, 500, 600, 500]
    assert [row[:1].tolist() for row in ragged.rows(taken)] == [[], [602], [1], [602]]
    assert len(ragged.take(t, [])) == 0 and ragged.take(t, []).dtype == torch.int64


def test_a_slice_is_a_view_and_an_index_is_a_copy() -> None:
    t = column([2, 2])
    ragged.parts(ragged.take(t, slice(1, 2)))[0][0] = 99
    ragged.parts(ragged.take(t, [0, 1]))[0][0] = 77
    assert plain(t) == [[1, 2], [99, 4]]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([3], "row 3 does not exist in a batch of 3 rows"),
        ([0, -4], "row -4 does not exist in a batch of 3 rows"),
        ([True, False], "a mask of 2 values cannot select from 3 rows"),
        ([0.5], "not by float64"),
        ([[0]], r"not by one of shape \(1, 1\)"),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(index: list, message: str) -> None:
    with pytest.raises(IndexError, match=message):
        ragged.take(column([1, 1, 1]), index)


@laws
@given(row_lengths, st.integers(0, 7))
def test_slices_put_together_again_are_the_column(lengths: list[int], at: int) -> None:
    t = column(lengths, torch.bfloat16)
    joined = ragged.concat([ragged.take(t, slice(0, at)), ragged.take(t, slice(at, None))])
    assert plain(joined) == plain(t)
    assert joined.dtype == torch.bfloat16


def test_concat_refuses_other_kinds() -> None:
    with pytest.raises(ValueError, match=r"dense int64 \(\) and ragged int64 \(\)"):
        ragged.concat([column([1]), torch.tensor([1])])
    with pytest.raises(ValueError, match=r"dense float32 \(\) and dense int64 \(\)"):
        ragged.concat([torch.zeros(1), torch.tensor([1])])
    with pytest.raises(ValueError, match="none given"):
        ragged.concat([])


@laws
@given(some_lengths, st.integers(0, 3))
def test_padding(lengths: list[int], extra: int) -> None:
    t = column(lengths)
    padded = ragged.to_padded(t, length=max(lengths) + extra, value=-1)
    assert padded.tolist() == [row + [-1] * (max(lengths) + extra - len(row)) for row in plain(t)]


def test_padding_keeps_inner_dimensions_and_defaults_to_the_longest_row() -> None:
    t = ragged.from_parts(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([1, 2]))
    assert ragged.to_padded(t).tolist() == [[[1, 2], [0, 0]], [[3, 4], [5, 6]]]


def test_padding_never_cuts_a_row() -> None:
    with pytest.raises(ValueError, match="row 1 has 3 tokens and does not fit a padded length of 2"):
        ragged.to_padded(column([1, 3]), length=2)
