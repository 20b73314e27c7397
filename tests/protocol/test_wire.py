"""Columns and batches as bytes: exact, out of band, without torch's pickler, and refused in words when they
cannot travel."""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from protocol.samples import laws, make_batch, row_lengths, rows_of

from hydraflow.protocol import ragged, wire
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.columns import first_difference

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex64,
]  # fmt: skip


def bits(t: torch.Tensor) -> bytes:
    return t.contiguous().view(torch.uint8).numpy().tobytes()


def any_bits(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Values of every bit pattern that random bytes give (NaN payloads, infinities, -0.0); bools are 0 and
    1."""
    size = torch.empty(0, dtype=dtype).element_size()
    noise = torch.randint(
        0, 256, (count * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    return (noise % 2).bool() if dtype == torch.bool else noise.view(dtype)


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_survives(dtype: torch.dtype, copy: bool) -> None:
    dense = any_bits(dtype, 12).reshape(3, 4)
    back = wire.decode(pickle.loads(pickle.dumps(wire.encode(dense), protocol=5)), copy=copy)
    assert back.dtype == dtype and back.shape == (3, 4) and bits(back) == bits(dense)
    column = ragged.from_parts(any_bits(dtype, 5), torch.tensor([2, 0, 3]))
    back = wire.decode(pickle.loads(pickle.dumps(wire.encode(column), protocol=5)), copy=copy)
    assert ragged.lengths(back).tolist() == [2, 0, 3] and bits(ragged.parts(back)[0]) == bits(
        any_bits(dtype, 5)
    )


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_columns_without_values_keep_shape_and_dtype(shape: tuple[int, ...]) -> None:
    for copy in (True, False):
        back = wire.decode(wire.encode(torch.zeros(shape, dtype=torch.bfloat16)), copy=copy)
        assert back.shape == shape and back.dtype == torch.bfloat16


def test_views_send_only_their_own_bytes() -> None:
    big = torch.arange(1000)
    assert wire.encode(big[10:12]).nbytes == 16
    assert wire.encode(big.reshape(100, 10)[:, 3]).nbytes == 800
    column = ragged.take(ragged.from_parts(big, torch.full((100,), 10)), slice(5, 7))
    assert wire.encode(column).nbytes == 20 * 8 + 2 * 8  # tokens and lengths, int64
    assert [row[0].item() for row in ragged.rows(wire.decode(wire.encode(column)))] == [50, 60]


def test_decode_copies_by_default() -> None:
    source = torch.zeros(3)
    copied, shared = wire.decode(wire.encode(source)), wire.decode(wire.encode(source), copy=False)
    source[0] = 5
    assert copied.tolist() == [0, 0, 0] and shared.tolist() == [5, 0, 0]


def test_read_only_memory_is_taken_without_a_warning() -> None:
    read_only = np.arange(4)
    read_only.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for copy in (True, False):
            assert wire.decode(
                wire.EncodedColumn("dense", "int64", (), (read_only,)), copy=copy
            ).tolist() == [
                0,
                1,
                2,
                3,
            ]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@laws
@given(st.lists(json_values, max_size=4))
def test_objects_come_back_equal(items: list) -> None:
    back = wire.decode(wire.encode(wire.as_objects(items)))
    assert back.tolist() == items and back.shape == (len(items),) and back.dtype == object


def test_numpy_values_become_plain_ones() -> None:
    items = [
        np.float32(0.5),
        np.arange(3),
        {"n": np.int64(7), "flag": np.bool_(True)},
        (1, [np.str_("a")]),
        math.nan,
    ]
    back = wire.decode(wire.encode(wire.as_objects(items))).tolist()
    assert back[:4] == [0.5, [0, 1, 2], {"n": 7, "flag": True}, [1, ["a"]]]
    assert math.isnan(back[4])


def test_tables_of_objects_keep_their_shape() -> None:
    table = np.array([["a", 1], ["b", 2], ["c", 3]], dtype=object)
    assert wire.decode(wire.encode(table)).tolist() == table.tolist()
    assert wire.decode(wire.encode(np.empty((0, 2), dtype=object))).shape == (0, 2)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (io.StringIO(), "a value of type _io.StringIO"),
        (b"raw", "a value of type builtins.bytes"),
        ({"inner": [torch.zeros(1)]}, "a value of type torch.Tensor"),
        ({1: "int key"}, "a dict with the key 1 of type int"),
        (np.longdouble(1), "a numpy"),
        ({"s": {1, 2}}, "a value of type builtins.set"),
    ],
)
def test_what_cannot_travel_is_named_with_its_column_and_row(bad: object, named: str) -> None:
    data = DataProto.from_dict(non_tensors={"extra_info": wire.as_objects(["fine", bad])})
    with pytest.raises(ValueError) as error:
        pickle.dumps(data, protocol=5)
    assert f"column 'extra_info', row 1: {named}" in str(error.value)
    assert "allowed are None, bool, int, float, str" in str(error.value)


def test_the_row_of_a_table_is_counted_in_rows() -> None:
    table = np.array([["a", "b"], ["c", b"d"]], dtype=object)
    with pytest.raises(ValueError, match="column 'x', row 1"):
        wire.encode(table, "x")


@laws
@given(row_lengths)
def test_a_batch_survives_pickling(lengths: list[int]) -> None:
    data = make_batch(lengths)
    back = pickle.loads(pickle.dumps(data, protocol=5))
    assert rows_of(back) == rows_of(data) and back.meta_info == data.meta_info and len(back) == len(lengths)
    assert all(first_difference(column, back.get(key)) is None for key, column in data.items())


def test_bytes_travel_out_of_band() -> None:
    data = DataProto.from_dict({"x": torch.zeros(50_000)}, {"uid": ["u"] * 50_000})
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    assert len(head) < 1000
    # float32 and a number for each row, and ["u"].
    assert sum(buffer.raw().nbytes for buffer in buffers) == 50_000 * 4 + 50_000 * 4 + 5
    assert rows_of(pickle.loads(head, buffers=buffers))[7] == {"x": 0.0, "uid": "u"}


def test_a_batch_read_from_shared_read_only_memory_may_be_written() -> None:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(
        DataProto.from_dict({"x": torch.zeros(3)}), protocol=5, buffer_callback=buffers.append
    )
    shared = [bytes(buffer.raw()) for buffer in buffers]
    first, second = pickle.loads(head, buffers=shared), pickle.loads(head, buffers=shared)
    first.get("x").add_(1)
    assert second.get("x").tolist() == [0, 0, 0]


def test_no_tensor_is_pickled_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("torch's own reader was called")

    payload = pickle.dumps(make_batch([2, 0, 3]), protocol=5)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch._utils, "_rebuild_tensor_v2", refuse)
    assert len(pickle.loads(payload)) == 3
    strings = [str(argument) for _, argument, _ in pickletools.genops(payload) if isinstance(argument, str)]
    modules = {text for text in strings if text.startswith(("torch", "tensordict", "numpy", "hydraflow"))}
    assert modules and all(name.startswith(("numpy", "hydraflow.protocol")) for name in modules)


def test_an_object_that_many_rows_share_is_written_once() -> None:
    shared = {"ground_truth": "042" * 100}
    column = np.array([shared] * 64 + [{"ground_truth": "x"}], dtype=object)
    encoded = wire.encode(column)
    assert encoded.nbytes < 1000
    assert wire.decode(encoded).tolist() == column.tolist()
