"""The methods that `DataProto` has for verl's users."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from protocol.samples import laws, make_batch, row_lengths, rows_of

from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto


def numbers(*values: int) -> DataProto:
    return DataProto.from_dict({"x": torch.tensor(values)})


def listed(data: DataProto) -> list[int]:
    return data.get("x").tolist()


@laws
@given(row_lengths)
def test_to_a_tensordict_and_back(lengths: list[int]) -> None:
    data = make_batch(lengths)
    back = DataProto.from_tensordict(data.to_tensordict())
    assert rows_of(back) == rows_of(data) and back.meta_info == {"step": 3}


def test_a_fact_named_like_a_column_has_no_place_in_a_tensordict() -> None:
    with pytest.raises(ValueError, match="share the names \\['x'\\]"):
        DataProto.from_dict({"x": torch.zeros(1)}, meta_info={"x": 1}).to_tensordict()


def test_repeat_each_row_its_own_number_of_times() -> None:
    for counts in ([2, 0, 1], torch.tensor([2, 0, 1]), np.array([2, 0, 1])):
        assert listed(numbers(5, 6, 7).sample_level_repeat(counts)) == [5, 5, 7]
    assert listed(numbers(5, 6).sample_level_repeat(2)) == [5, 5, 6, 6]
    with pytest.raises(ValueError, match="2 repeat counts were given for 3 rows"):
        numbers(5, 6, 7).sample_level_repeat([1, 2])


def test_unfold_column_chunks() -> None:
    data = DataProto.from_dict(
        {
            "wide": torch.arange(8).reshape(2, 4),
            "tokens": ragged.from_parts(torch.arange(6), torch.tensor([2, 4])),
            "score": torch.tensor([0.5, 1.5]),
        },
        {"uid": ["a", "b"]},
    )
    unfolded = data.unfold_column_chunks(2, split_keys=["wide", "tokens"])
    assert unfolded.get("wide").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [row.tolist() for row in ragged.rows(unfolded.get("tokens"))] == [[0], [1], [2, 3], [4, 5]]
    assert unfolded.get("score").tolist() == [0.5, 0.5, 1.5, 1.5] and unfolded.get("uid").tolist() == [
        "a",
        "a",
        "b",
        "b",
    ]
    with pytest.raises(ValueError, match="column 'tokens', row 0: 2 tokens do not divide into 4 pieces"):
        data.unfold_column_chunks(4, split_keys=["tokens"])
    with pytest.raises(ValueError, match="column 'score' of shape \\(2,\\) does not divide"):
        data.unfold_column_chunks(2)


def test_mini_batches_in_order_and_shuffled() -> None:
    data = numbers(0, 1, 2, 3)
    assert [listed(part) for part in data.make_iterator(2, epochs=2)] == [[0, 1], [2, 3], [0, 1], [2, 3]]
    drawn = [
        [listed(part) for part in data.make_iterator(2, 3, seed=1, dataloader_kwargs={"shuffle": True})]
        for _ in range(2)
    ]
    assert drawn[0] == drawn[1]
    epochs = [drawn[0][i] + drawn[0][i + 1] for i in (0, 2, 4)]
    assert (
        all(sorted(epoch) == [0, 1, 2, 3] for epoch in epochs) and len({tuple(epoch) for epoch in epochs}) > 1
    )
    with pytest.raises(ValueError, match="4 rows do not divide into mini-batches of 3"):
        data.make_iterator(3, 1)
    with pytest.raises(ValueError, match="got \\['num_workers'\\]"):
        data.make_iterator(2, 1, dataloader_kwargs={"num_workers": 1})
