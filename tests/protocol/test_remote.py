"""RemoteBatch: row operations on references give the rows that the same operations give on data, and nothing
is read for them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from protocol.samples import laws, make_batch, rows_of, some_lengths

from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.pieces import piece_plan
from hydraflow.protocol.remote import Column, ColumnRef, LocalColumn, RemoteBatch, materialise

TENSORS = ["tokens", "logp", "pairs", "score", "flag"]


@dataclass(frozen=True)
class FarRef:
    """A reference into a `Store`."""

    name: str
    rows: int


class Store:
    """Columns that only `fetch` can reach, and what was asked of it."""

    def __init__(self) -> None:
        self.data: dict[ColumnRef, torch.Tensor | np.ndarray] = {}
        self.asked: list[list[ColumnRef]] = []

    def put(self, name: str, data: torch.Tensor | np.ndarray) -> FarRef:
        ref = FarRef(name, len(data))
        self.data[ref] = data
        return ref

    def fetch(self, refs: list[ColumnRef]) -> list[torch.Tensor | np.ndarray]:
        self.asked.append(refs)
        return [self.data[ref] for ref in refs]

    def hold(self, data: DataProto, sizes: list[int]) -> RemoteBatch:
        """`data` as a batch of references, each tensor column in pieces of the given numbers of rows."""
        ends = np.cumsum(sizes)
        cuts = [slice(int(end) - size, int(end)) for end, size in zip(ends, sizes)]
        columns = {
            key: Column(tuple(self.put(f"{key}{i}", data[cut].get(key)) for i, cut in enumerate(cuts)))
            for key in TENSORS
        }
        return RemoteBatch(columns, dict(data.non_tensor_batch), dict(data.meta_info))


def refuse(refs: list[ColumnRef]) -> list[torch.Tensor]:
    raise AssertionError("nothing is to be fetched here")


def held(lengths: list[int], pieces: int = 3) -> tuple[Store, DataProto, RemoteBatch]:
    store, data = Store(), make_batch(lengths)
    sizes = [len(part) for part in np.array_split(np.arange(len(lengths)), pieces)]
    return store, data, store.hold(data, sizes)


@st.composite
def operations(draw: st.DrawFn) -> list[Callable]:
    """Row operations that DataProto and RemoteBatch both have."""

    def select(seed: int) -> Callable:
        return lambda b: b.select_idxs(np.random.default_rng(seed).integers(0, len(b), size=1 + seed % 7))

    def shuffled(seed: int) -> Callable:
        return lambda b: b.select_idxs(np.random.default_rng(seed).permutation(len(b)))

    kinds = st.one_of(
        st.builds(select, st.integers(0, 99)),
        st.builds(shuffled, st.integers(0, 99)),
        st.builds(lambda n, i: lambda b: b.repeat(n, i), st.integers(1, 3), st.booleans()),
        st.builds(lambda n: lambda b: b.split(n)[-1], st.integers(1, 4)),
        st.builds(lambda n: lambda b: type(b).concat(b.split(n)[::-1]), st.integers(1, 4)),
        st.just(lambda b: type(b).concat([b, b])),
        st.just(lambda b: b.chunk(len(b))[0] if len(b) > 4 else b),
    )
    return draw(st.lists(kinds, max_size=4))


@laws
@given(some_lengths, st.integers(1, 4), operations(), st.booleans())
def test_the_same_operations_give_the_same_rows(
    lengths: list[int], pieces: int, steps: list[Callable], copy: bool
) -> None:
    store, data, batch = held(lengths, pieces)
    for step in steps:
        data, batch = step(data), step(batch)
    assert len(batch) == len(data) and store.asked == []
    assert rows_of(materialise(batch, store.fetch, copy=copy)) == rows_of(data)
    assert len(store.asked) == 1
    sent = pickle.loads(pickle.dumps(batch.localised(), protocol=5))
    assert rows_of(materialise(sent, store.fetch, copy=copy)) == rows_of(data)


@laws
@given(some_lengths, operations())
def test_local_columns_too(lengths: list[int], steps: list[Callable]) -> None:
    data = make_batch(lengths)
    batch = RemoteBatch.from_local(data)
    for step in steps:
        data, batch = step(data), step(batch)
    assert rows_of(materialise(batch, refuse)) == rows_of(data)
    sent = pickle.loads(pickle.dumps(batch.localised(), protocol=5))
    assert rows_of(materialise(sent, refuse)) == rows_of(data)
    assert sent.meta_info == {"step": 3}


@laws
@given(some_lengths, st.integers(1, 9))
def test_padding_repeats_from_the_start(lengths: list[int], divisor: int) -> None:
    store, data, batch = held(lengths)
    padded, pad = batch.pad_to_divisor(divisor)
    rows = rows_of(data)
    assert len(padded) % divisor == 0 and 0 <= pad < divisor
    assert rows_of(materialise(padded, store.fetch)) == [rows[i % len(rows)] for i in range(len(rows) + pad)]


def test_only_needed_pieces_and_columns_are_fetched_in_one_call() -> None:
    store, data, batch = held([1, 2, 3, 1, 2, 3])
    last = batch.chunk(3)[2]
    assert rows_of(materialise(last, store.fetch, ["tokens", "uid"])) == rows_of(
        data[4:].select(["tokens"], ["uid"])
    )
    assert store.asked == [[FarRef("tokens2", 2)]]
    materialise(batch.select_idxs([5, 0]), store.fetch, ["tokens", "score"])
    assert sorted(ref.name for ref in store.asked[1]) == ["score0", "score2", "tokens0", "tokens2"]
    materialise(batch, store.fetch, ["uid"])
    assert len(store.asked) == 2


def test_pieces_and_their_order() -> None:
    _, _, batch = held([1, 2, 3, 1, 2, 3])
    plan = piece_plan(batch.select_idxs([5, 2, 3, 4]).columns["tokens"])
    assert [(number, None if rows is None else rows.tolist()) for number, rows in plan.picks] == [
        (1, None),
        (2, [1, 0]),
    ]
    assert plan.order.tolist() == [2, 0, 1, 3]
    plan = piece_plan(batch.columns["tokens"])
    assert [rows for _, rows in plan.picks] == [None, None, None] and plan.order is None


def test_columns_share_one_index() -> None:
    _, _, batch = held([1] * 6)
    moved = RemoteBatch.concat(batch.select_idxs([5, 4, 3, 2, 1, 0]).repeat(2).chunk(3)[:2])
    assert len({id(column.index) for column in moved.columns.values()}) == 1
    sent = pickle.loads(pickle.dumps(moved.localised()))
    assert len({id(column.index) for column in sent.columns.values()}) == 1
    assert next(iter(sent.columns.values())).index.dtype == np.uint8


def test_joining_the_chunks_gives_the_pieces_back() -> None:
    _, _, batch = held([1] * 6)
    joined = RemoteBatch.concat(batch.chunk(2))
    assert joined.columns["tokens"].refs == batch.columns["tokens"].refs
    assert joined.columns["tokens"].index is None


def test_a_whole_piece_is_a_copy_unless_the_reader_only_reads() -> None:
    store, data, batch = held([1, 2, 3], pieces=1)
    for rows in (slice(None), slice(1, 3)):
        for key in ("score", "tokens"):
            for copy in (True, False):
                column = materialise(batch[rows], store.fetch, [key], copy=copy).get(key)
                stored = store.data[FarRef(f"{key}0", 3)]
                assert (storage(column) == storage(stored)) is not copy


def storage(column: torch.Tensor) -> int:
    values = ragged.parts(column)[0] if ragged.is_ragged(column) else column
    return values.untyped_storage().data_ptr()


def test_local_columns_are_cut_before_they_are_sent() -> None:
    data = DataProto.from_dict({"x": torch.arange(100_000)})
    part = RemoteBatch.from_local(data).repeat(8).chunk(1000)[1]  # 800 rows of 100 values
    local = part.localised().columns["x"]
    assert local.refs[0].rows == 100
    # Each value once, one byte of index a row, and the envelope.
    assert len(pickle.dumps(part.localised())) < 100 * 8 + 800 + 1000


def test_a_batch_of_references_pickles_small() -> None:
    store = Store()
    rows, names = 10_000, ["responses", "response_mask", "old_log_probs", "ref_log_prob"]
    columns = {name: Column(tuple(FarRef(f"{name}{i}", rows // 8) for i in range(8))) for name in names}
    batch = RemoteBatch(columns).select_idxs(np.random.default_rng(0).permutation(rows))
    sent = sum(len(pickle.dumps(part.localised(), protocol=5)) for part in batch.chunk(8))
    # Two bytes of index a row, shared by all columns; 32 references to each of 8 workers.
    assert sent < 2 * rows + 8 * 32 * 60
    assert store.asked == []


def test_columns_of_objects_may_be_references() -> None:
    store = Store()
    ref = store.put("uid", np.array(["a", "b", "c"], dtype=object))
    data = materialise(RemoteBatch({"uid": Column((ref,))}).select_idxs([2, 0]), store.fetch)
    assert data.get("uid").tolist() == ["c", "a"] and data.batch is None


def test_a_batch_without_rows_keeps_its_dtypes() -> None:
    store, data, batch = held([1, 2, 3])
    empty = materialise(batch[:0], store.fetch)
    assert (
        len(empty) == 0 and empty.get("logp").dtype == torch.bfloat16 and empty.get("pairs").shape[2:] == (2,)
    )
    assert rows_of(materialise(batch[:0].localised(), store.fetch)) == []


def test_select_pop_rename_reorder() -> None:
    store, data, batch = held([1, 2, 3])
    assert batch.select(["tokens"]).keys() == ["tokens", "uid", "info"]
    popped = batch.pop(["tokens"], ["uid"], ["step"])
    assert popped.keys() == ["tokens", "uid"] and popped.meta_info == {"step": 3} and batch.meta_info == {}
    assert batch.rename("logp", "old_log_probs") is batch
    assert batch.keys() == ["old_log_probs", "pairs", "score", "flag", "info"]
    assert batch.reorder([2, 1, 0]) is None
    assert materialise(batch, store.fetch, ["info"]).get("info").tolist() == data.get("info").tolist()[::-1]
    for call in (
        lambda: batch.select(["nope"]),
        lambda: batch.rename("nope", "x"),
        lambda: materialise(batch, refuse, ["nope"]),
    ):
        with pytest.raises(KeyError, match="nope"):
            call()


def test_union_adds_columns_and_accepts_the_same_references() -> None:
    store, data, batch = held([1, 2, 3])
    extra = DataProto.from_dict(
        {"values": torch.tensor([1.0, 2.0, 3.0])}, {"uid": ["u0", "u1", "u2"]}, {"epoch": 1}
    )
    assert batch.union(batch.select(["tokens"])).union(extra) is batch
    assert batch.union(batch[:3].select(["tokens"])) is batch, "all rows, in order"
    read = materialise(batch.select_idxs([2, 0]), store.fetch, ["values", "uid", "score"])
    assert read.get("values").tolist() == [3, 1] and read.get("uid").tolist() == ["u2", "u0"]
    assert batch.meta_info == {"step": 3, "epoch": 1}


def test_union_never_reads_to_compare() -> None:
    _, _, batch = held([1, 2, 3])
    with pytest.raises(ValueError, match="column 'tokens' is in both batches, but not as the same reference"):
        batch.union(batch.select(["tokens"], [])[[2, 1, 0]])
    with pytest.raises(ValueError, match="column 'uid' differs between the two batches, first at row 1"):
        batch.union(RemoteBatch(objects={"uid": np.array(["u0", "x", "u2"], dtype=object)}))
    with pytest.raises(ValueError, match="batches of 3 and 2 rows"):
        batch.union(batch[:2].select([], ["uid"]).rename("uid", "other"))


def test_mistakes_are_named() -> None:
    _, _, batch = held([1, 2, 3])
    with pytest.raises(ValueError, match="3 rows do not divide into 2 equal chunks"):
        batch.chunk(2)
    with pytest.raises(ValueError, match="got x: 2, uid: 1"):
        RemoteBatch({"x": Column((LocalColumn(torch.zeros(2)),))}, {"uid": np.array(["a"], dtype=object)})
    with pytest.raises(ValueError, match="differ in their columns"):
        RemoteBatch.concat([batch, batch.select(["tokens"])])
    text = RemoteBatch({"u": Column((LocalColumn(np.array(["a"], dtype=object)),))})
    with pytest.raises(
        ValueError, match=r"columns \['u'\] are references in one batch and objects in another"
    ):
        RemoteBatch.concat([text, RemoteBatch(objects={"u": np.array(["a"], dtype=object)})])
    lying = RemoteBatch({"x": Column((FarRef("x", 3),))})
    with pytest.raises(ValueError, match="a piece should have 3 rows, but has 2"):
        materialise(lying, lambda refs: [torch.zeros(2)])
