"""DataProto's operations, on batches with every kind of column."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from protocol.samples import laws, make_batch, row_lengths, rows_of, some_lengths
from tensordict import TensorDict

from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto


def numbers(*values: int) -> DataProto:
    return DataProto.from_dict({"x": torch.tensor(values)})


def listed(data: DataProto) -> list[int]:
    return data.get("x").tolist()


# Making


def test_rows_must_agree_and_every_count_is_named() -> None:
    with pytest.raises(ValueError, match="same number of rows; got x: 2, uid: 3"):
        DataProto.from_dict({"x": torch.zeros(2)}, {"uid": ["a", "b", "c"]})
    with pytest.raises(ValueError, match="same number of rows, here 2; got x: 2, uid: 1"):
        DataProto(TensorDict({"x": torch.zeros(2)}, batch_size=[2]), {"uid": np.array(["a"], dtype=object)})


@pytest.mark.parametrize(
    ("tensors", "objects", "message"),
    [
        ({"x": [1, 2]}, {}, "column 'x' is a list, not a tensor"),
        ({"x": torch.tensor(1)}, {}, "column 'x' is a single value"),
        ({}, {"uid": "abc"}, "column 'uid' is a str"),
        ({"x": torch.zeros(1)}, {"x": ["a"]}, "both tensors and objects"),
    ],
)
def test_columns_that_are_none_are_refused(tensors: dict, objects: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataProto.from_dict(tensors, objects)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_the_old_layout_are_refused() -> None:
    with pytest.raises(
        ValueError, match="column 'x' is a nested tensor of the old layout; use layout=torch.jagged"
    ):
        DataProto.from_dict({"x": torch.nested.nested_tensor([torch.zeros(1)], layout=torch.strided)})


@pytest.mark.parametrize("rows", [[(8, 2), (8, 3)], [(3, 4), (3, 1), (3, 2)]])
def test_columns_that_are_ragged_in_another_dimension_are_refused(rows: list[tuple[int, int]]) -> None:
    """verl's position ids of three kinds are like that; rows of them would come out with other numbers."""
    column = torch.nested.nested_tensor([torch.ones(*row) for row in rows], layout=torch.jagged)
    with pytest.raises(
        ValueError, match="column 'x' is ragged in dimension 2; rows may differ in their first"
    ):
        DataProto.from_dict({"x": column})
    data = DataProto.from_dict({"n": torch.zeros(len(rows))})
    data.batch["x"] = column
    for wrong in (lambda: data.select_idxs([0]), lambda: data.chunk(1), lambda: pickle.dumps(data)):
        with pytest.raises(ValueError, match="ragged in dimension 1 only, not in dimension 2"):
            wrong()


def test_rows_of_lists_stay_lists() -> None:
    data = DataProto.from_single_dict({"pair": [[1, 2], [3, 4]], "n": np.array([5, 6]), "x": torch.zeros(2)})
    assert data.get("pair").shape == (2,) and data.get("pair")[1] == [3, 4]
    assert data.get("n").dtype == object and data.keys() == ["x", "pair", "n"]


def test_batches_of_nothing_and_of_objects_only() -> None:
    assert len(DataProto()) == 0 and DataProto().keys() == []
    data = DataProto.from_dict(non_tensors={"uid": ["a", "b", "c"]})
    assert len(data) == 3 and data.batch is None
    assert [len(part) for part in data.chunk(3)] == [1, 1, 1]
    assert DataProto.concat(data.split(2)).get("uid").tolist() == ["a", "b", "c"]
    assert data.repeat(2).get("uid").tolist() == ["a", "a", "b", "b", "c", "c"]


# Rows


@laws
@given(row_lengths, st.data())
def test_indexing_gives_the_named_rows(lengths: list[int], data: st.DataObject) -> None:
    batch, rows = make_batch(lengths), rows_of(make_batch(lengths))
    index = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=8) if rows else st.just([]))
    for form in (index, np.array(index, dtype=np.int64), torch.tensor(index, dtype=torch.int64)):
        assert rows_of(batch[form]) == [rows[i] for i in index]
    cut = data.draw(st.slices(len(rows)))
    assert rows_of(batch[cut]) == rows[cut]
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))), dtype=bool)
    assert rows_of(batch[mask]) == [row for row, keep in zip(rows, mask) if keep]


def test_one_row() -> None:
    item = make_batch([2, 3])[-1]
    assert (
        item.batch["tokens"].shape == (3,)
        and item.batch["pairs"].shape == (3, 2)
        and item.batch["score"].shape == (2,)
    )
    assert item.non_tensor_batch["uid"] == "u1" and item.meta_info == {"step": 3}
    with pytest.raises(IndexError, match="row 2 does not exist"):
        make_batch([2, 3])[2]
    assert [row.non_tensor_batch["uid"] for row in make_batch([2, 3])] == ["u0", "u1"]


@laws
@given(some_lengths, st.integers(1, 7))
def test_chunk_or_split_then_concat_is_the_batch(lengths: list[int], parts: int) -> None:
    data = make_batch(lengths)
    assert rows_of(DataProto.concat(data.split(parts))) == rows_of(data)
    if len(lengths) % parts:
        with pytest.raises(ValueError, match=f"{len(lengths)} rows do not divide into {parts} equal chunks"):
            data.chunk(parts)
        return
    chunks = data.chunk(parts)
    assert [len(part) for part in chunks] == [len(lengths) // parts] * parts
    assert rows_of(DataProto.concat(chunks)) == rows_of(data)


def test_splitting_an_empty_batch() -> None:
    assert make_batch([]).split(2) == []
    assert [len(part) for part in make_batch([]).chunk(2)] == [0, 0]
    assert rows_of(DataProto.concat(make_batch([]).chunk(2))) == []
    with pytest.raises(ValueError, match="split_size is 0"):
        make_batch([1]).split(0)


@laws
@given(row_lengths, st.randoms(use_true_random=False))
def test_reorder_then_its_inverse_is_the_batch(lengths: list[int], random: object) -> None:
    data = make_batch(lengths)
    order = np.array(random.sample(range(len(lengths)), len(lengths)), dtype=np.int64)
    assert data.reorder(order) is None
    assert rows_of(data) == [rows_of(make_batch(lengths))[i] for i in order]
    data.reorder(np.argsort(order))
    assert rows_of(data) == rows_of(make_batch(lengths))


@laws
@given(row_lengths, st.integers(0, 3))
def test_repeat(lengths: list[int], times: int) -> None:
    data, rows = make_batch(lengths), rows_of(make_batch(lengths))
    assert rows_of(data.repeat(times)) == [row for row in rows for _ in range(times)]
    assert rows_of(data.repeat(times, interleave=False)) == rows * times


# Columns


def test_select_pop_and_rename() -> None:
    data = make_batch([1, 2])
    assert data.select(["tokens"], ["uid"], []).keys() == ["tokens", "uid"]
    assert data.select(["tokens"]).keys() == ["tokens", "uid", "info"]
    popped = data.pop(["tokens"], ["uid"], ["step"])
    assert popped.keys() == ["tokens", "uid"] and popped.meta_info == {"step": 3}
    assert data.keys() == ["logp", "pairs", "score", "flag", "info"] and data.meta_info == {}
    assert data.rename(["logp", "info"], ["old_log_probs", "extra_info"]) is data
    assert data.keys() == ["old_log_probs", "pairs", "score", "flag", "extra_info"] and len(data) == 2


def test_names_that_are_not_there() -> None:
    data = make_batch([1])
    with pytest.raises(KeyError, match="no column \\['nope'\\]"):
        data.select(["nope"])
    with pytest.raises(KeyError, match="no object column \\['tokens'\\]"):
        data.pop(["score"], ["tokens"])
    assert "score" in data.keys()  # noqa: SIM118  a failed pop takes nothing
    with pytest.raises(KeyError, match="no column 'nope'"):
        data.get("nope")
    with pytest.raises(ValueError, match="would give two columns one name"):
        data.rename("logp", "tokens")


@laws
@given(row_lengths)
def test_union_with_an_equal_batch_changes_nothing(lengths: list[int]) -> None:
    data = make_batch(lengths)
    assert data.union(make_batch(lengths)) is data
    assert rows_of(data) == rows_of(make_batch(lengths))


def test_union_adds_columns_and_facts() -> None:
    data = make_batch([1, 2]).union(
        DataProto.from_dict({"values": torch.ones(2)}, {"tag": ["p", "q"]}, {"epoch": 1})
    )
    assert set(data.keys()) == {"tokens", "logp", "pairs", "score", "flag", "uid", "info", "values", "tag"}
    assert data.meta_info == {"step": 3, "epoch": 1}
    assert DataProto().union(numbers(1, 2)).get("x").tolist() == [1, 2]


def ragged_rows(*rows: list[float]) -> torch.Tensor:
    return ragged.from_rows([torch.tensor(row, dtype=torch.float32) for row in rows])


@pytest.mark.parametrize(
    ("mine", "theirs", "where"),
    [
        (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 5.0, 6.0]), "row 1"),
        (torch.zeros(2, 2), torch.tensor([[0.0, 0.0], [0.0, 1.0]]), "row 1"),
        (ragged_rows([1, 2], [], [3]), ragged_rows([1, 2], [], [4]), "row 2"),
        (ragged_rows([1, 2], [], [3]), ragged_rows([1], [2], [3]), "row 0"),
        (ragged_rows([1, 2], [5, 5], [3]), ragged_rows([1, 9], [5], [3]), "row 0"),
        (ragged_rows([1, 2], [5, 5]), ragged_rows([1, 2], [5]), "row 1"),
        (
            torch.zeros(2),
            torch.zeros(2, dtype=torch.float64),
            "dense float32 \\(\\) and 2 rows of dense float64",
        ),
        (np.array(["a", "b"], dtype=object), np.array(["a", "c"], dtype=object), "row 1"),
        (np.array([{"k": [1]}], dtype=object), np.array([{"k": [2]}], dtype=object), "row 0"),
        (np.array([1], dtype=object), torch.ones(1), "one is a tensor, the other holds objects"),
    ],
)
def test_union_names_the_column_and_the_first_differing_row(mine: object, theirs: object, where: str) -> None:
    data = DataProto.from_single_dict({"col": mine}, {"a": 1})
    with pytest.raises(ValueError, match=f"column 'col' differs between the two batches, first at .*{where}"):
        data.union(DataProto.from_single_dict({"col": theirs, "new": theirs}, {"b": 1}))
    assert data.keys() == ["col"] and data.meta_info == {"a": 1}  # nothing was taken over


def test_nan_equals_nan_in_a_union() -> None:
    def batch() -> DataProto:
        tensors = {"d": torch.tensor([math.nan, 1.0]), "r": ragged_rows([math.nan], [2.0])}
        return DataProto.from_dict(
            tensors, {"o": [float("nan"), {"v": np.array([math.nan, 1])}]}, {"limit": float("nan")}
        )

    assert len(batch().union(batch())) == 2


def test_union_refuses_other_row_counts_and_facts() -> None:
    with pytest.raises(ValueError, match="batches of 2 and 3 rows cannot be united"):
        numbers(1, 2).union(DataProto.from_dict({"y": torch.zeros(3)}))
    with pytest.raises(ValueError, match="meta_info 'step' differs between the batches: 3 and 4"):
        make_batch([1]).union(DataProto(meta_info={"step": 4}))


def test_concat_merges_metrics_and_refuses_what_differs() -> None:
    parts = [
        DataProto.from_dict({"x": torch.tensor([i])}, meta_info={"t": 1, "metrics": {"loss": float(i)}})
        for i in range(3)
    ]
    joined = DataProto.concat(parts)
    assert listed(joined) == [0, 1, 2] and joined.meta_info == {"t": 1, "metrics": {"loss": [0.0, 1.0, 2.0]}}
    assert DataProto.concat([joined, parts[1]]).meta_info["metrics"] == {"loss": [0.0, 1.0, 2.0, 1.0]}
    with pytest.raises(ValueError, match="concat: columns \\['x', 'y'\\] are not in all"):
        DataProto.concat([numbers(1), DataProto.from_dict({"y": torch.zeros(1)})])
    with pytest.raises(ValueError, match="column 'x': columns of different kinds .* dense float32"):
        DataProto.concat([numbers(1), DataProto.from_dict({"x": torch.zeros(1)})])
    with pytest.raises(ValueError, match="at least one batch"):
        DataProto.concat([])


def test_a_batch_moves_to_a_device_with_its_objects() -> None:
    moved = make_batch([2, 1]).to("cpu")
    assert rows_of(moved) == rows_of(make_batch([2, 1]))
    assert repr(moved).startswith("DataProto(2 rows; tokens: ragged int64 (), ")


def test_facts_may_be_tensors_of_one_number() -> None:
    def batch(fact: torch.Tensor) -> DataProto:
        return DataProto.from_dict({"x": torch.zeros(1)}, meta_info={"fact": fact})

    joined = DataProto.concat([batch(torch.tensor(1.0)), batch(torch.tensor(1.0))])
    assert joined.meta_info["fact"] == 1.0
    for other in (torch.tensor(2.0), torch.ones(1)):
        with pytest.raises(ValueError, match="fact"):
            DataProto.concat([batch(torch.tensor(1.0)), batch(other)])


def test_what_does_not_join_or_divide_is_named() -> None:
    def objects(value: object) -> DataProto:
        column = np.empty((1, 2) if isinstance(value, list) else 1, dtype=object)
        column[:] = value
        return DataProto.from_dict({"x": torch.zeros(1)}, {"which": column})

    with pytest.raises(ValueError, match="column 'which' has rows of different shapes"):
        DataProto.concat([objects("a"), objects(["a", "b"])])
    with pytest.raises(ValueError, match="rows cannot be cut into 0 pieces"):
        DataProto.from_dict({"x": torch.zeros(2, 4)}).unfold_column_chunks(0)
