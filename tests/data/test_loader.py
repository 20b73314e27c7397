"""The order of rows: a function of (seed, epoch), and exact after a resume."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hydraflow.data.loader import PromptLoader
from hydraflow.errors import ConfigError
from hydraflow.protocol.batch import DataProto


class Numbers:
    """A dataset whose rows are their own numbers."""

    def __init__(self, rows: int):
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def batch(self, rows: np.ndarray) -> DataProto:
        return DataProto.from_dict(tensors={"number": torch.as_tensor(rows)})


def loader(
    rows: int = 10, batch_size: int = 3, *, shuffle: bool = True, seed: int = 1, drop_last: bool = True
) -> PromptLoader:
    return PromptLoader(Numbers(rows), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)


def numbers(batch: DataProto) -> list[int]:
    return batch.get("number").tolist()


def test_unshuffled_rows_come_in_order_and_the_rest_is_dropped() -> None:
    data = loader(shuffle=False)
    assert len(data) == 3
    assert [numbers(b) for b in data] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert data.epoch == 0
    assert [numbers(b) for b in data][0] == [0, 1, 2] and data.epoch == 1


def test_the_rest_is_kept_when_asked() -> None:
    data = loader(shuffle=False, drop_last=False)
    assert len(data) == 4 and [numbers(b) for b in data][-1] == [9]


def test_each_epoch_is_another_permutation() -> None:
    data = loader(rows=9)
    first, second = ([n for b in data for n in numbers(b)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(9))
    assert first != second
    assert [n for b in loader(rows=9) for n in numbers(b)] == first
    assert [n for b in loader(rows=9, seed=2) for n in numbers(b)] != first


def test_order_does_not_touch_global_random_state() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    loader().next_batch()
    assert torch.equal(before[0], torch.get_rng_state()) and np.array_equal(
        before[1], np.random.get_state()[1]
    )


@given(taken=st.integers(0, 12), rows=st.integers(3, 12))
def test_a_resumed_loader_goes_on_exactly(taken: int, rows: int) -> None:
    uninterrupted = loader(rows=rows)
    for _ in range(taken):
        uninterrupted.next_batch()
    resumed = loader(rows=rows)
    resumed.load_state(uninterrupted.state())
    assert [numbers(resumed.next_batch()) for _ in range(5)] == [
        numbers(uninterrupted.next_batch()) for _ in range(5)
    ]


def test_iteration_after_a_resume_yields_the_rest_of_the_epoch() -> None:
    data = loader(shuffle=False)
    data.next_batch()
    resumed = loader(shuffle=False)
    resumed.load_state(data.state())
    assert [numbers(b) for b in resumed] == [[3, 4, 5], [6, 7, 8]]


def test_a_state_of_other_data_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        loader(rows=10, seed=1).load_state(loader(rows=11, seed=2).state())
    assert [(p.field, p.value) for p in caught.value.problems] == [
        ("rows of data.train_files", 10),
        ("trainer.seed", 1),
    ]
    assert "written with 11" in str(caught.value)


@pytest.mark.parametrize("batch_size", [0, 11])
def test_a_batch_that_cannot_be_filled_is_refused(batch_size: int) -> None:
    with pytest.raises(
        ConfigError, match=f"data.train_batch_size={batch_size}: must be between 1 and the number of rows, 10"
    ):
        loader(batch_size=batch_size)
