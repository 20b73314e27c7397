"""Reading tensors that are in files in pieces, and writing them; by hand and for all ways to cut."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_merger.directories import assert_same_bits, read
from safetensors.torch import save_file

from hydraflow.engine.stored import pieces
from hydraflow.engine.stored.pieces import (
    ByteRange,
    Piece,
    StoredTensor,
    block_rows,
    numbers_of,
    odd_strides,
    whole,
)
from hydraflow.errors import ConfigError
from hydraflow.model_merger import safetensors_files
from hydraflow.model_merger.safetensors_files import TensorSpec, Writer


def stored(file: Path, tensor: torch.Tensor, cuts: list[list[int]]) -> StoredTensor:
    """The tensor with its boxes in a file one after the other; cuts: for each dimension where it is cut."""
    found, at = [], 0
    edges = [[0, *cut, size] for cut, size in zip(cuts, tensor.shape, strict=True)]
    with file.open("wb") as opened:
        for box in itertools.product(*(list(itertools.pairwise(edge)) for edge in edges)):
            part = tensor[tuple(slice(first, last) for first, last in box)].contiguous()
            opened.write(part.reshape(-1).view(torch.uint8).numpy().tobytes())
            found.append(
                Piece(tuple(first for first, _ in box), tuple(part.shape), ByteRange(file, at, part.nbytes))
            )
            at += part.nbytes
    return StoredTensor("w", tensor.dtype, tuple(tensor.shape), tuple(found))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_however_it_is_cut_it_comes_back(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), max_size=3))
    cuts = [
        sorted(data.draw(st.sets(st.integers(1, size - 1), max_size=2))) if size > 1 else [] for size in shape
    ]
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
    tensor = torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)
    lying = stored(tmp_path_factory.mktemp("pieces") / "file", tensor, cuts)
    assert lying.holes() is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "BLOCK_BYTES", data.draw(st.integers(1, 400)))
        assert torch.equal(whole(lying), tensor)
        assert sum(len(block) for block in lying.blocks()) == (shape[0] if shape else 1)


def test_blocks_hold_whole_rows() -> None:
    assert list(block_rows((10, 2**20), torch.bfloat16)) == [(0, 4), (4, 8), (8, 10)]
    assert list(block_rows((2, 2**24), torch.float32)) == [(0, 1), (1, 2)]
    assert list(block_rows((), torch.float32)) == [(0, 1)]
    assert list(block_rows((0, 3), torch.float32)) == []


def test_holes_and_overlaps_are_seen(tmp_path: Path) -> None:
    whole_one = stored(tmp_path / "file", torch.arange(12.0).view(4, 3), [[2], []])
    first, second = whole_one.pieces
    assert "hold 6 numbers, its shape [4, 3] has 12" in str(replace(whole_one, pieces=(first,)).holes())
    assert "hold 12 numbers" in str(replace(whole_one, pieces=(first, first)).holes())
    assert "reaches beyond" in str(replace(whole_one, pieces=(first, replace(second, start=(3, 0)))).holes())


def read_back(tensor: torch.Tensor, byte_range: ByteRange, **facts: Any) -> torch.Tensor:
    """What is read of a tensor that is one piece."""
    shape = tuple(tensor.shape)
    piece = Piece((0,) * tensor.dim(), shape, byte_range, **facts)
    return whole(StoredTensor("w", tensor.dtype, shape, (piece,)))


def test_numbers_that_do_not_lie_in_order(tmp_path: Path) -> None:
    """torch.save keeps a transposed tensor transposed, and a slice as a part of its storage."""
    full = torch.arange(24.0).view(4, 6)
    tensors = {"transposed": full.T, "slice": full[1:3], "columns": full[:, 2:4], "number": full[2, 3]}
    for name, tensor in tensors.items():
        file = tmp_path / name
        torch.save(tensor, file)
        found = torch.load(file, map_location="meta", weights_only=True)
        numbers, archive = numbers_of(found, file), ByteRange(file, 0, file.stat().st_size)
        assert torch.equal(read_back(tensor, numbers, strides=odd_strides(found)), tensor), name
        assert torch.equal(read_back(tensor, archive, archived=True), tensor), name


def test_an_archive_must_hold_what_is_announced(tmp_path: Path) -> None:
    file = tmp_path / "file"
    torch.save(torch.zeros(3), file)
    with pytest.raises(
        ConfigError, match=r"holds torch.float32 \[3\] at byte 0, but the index says torch.float32 \[4\]"
    ):
        read_back(torch.zeros(4), ByteRange(file, 0, file.stat().st_size), archived=True)


def test_written_files_are_those_that_safetensors_reads(tmp_path: Path) -> None:
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "w": torch.arange(6.0).view(2, 3),
        "half": torch.arange(5.0).bfloat16(),
        "number": torch.tensor(7),
        "empty": torch.zeros(0, 4),
    }
    specs = {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    writer = Writer(tmp_path, specs, most_bytes=10**6)
    for name in reversed(list(tensors)):
        rows = (
            tensors[name].reshape(-1, *tensors[name].shape[1:])
            if tensors[name].dim()
            else tensors[name].view(1)
        )
        writer.write(name, iter(rows.split(2)))
    writer.finish()
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert_same_bits(read(tmp_path), tensors)
    assert_same_bits(
        {name: whole(found) for name, found in safetensors_files.read_directory(tmp_path, field="x").items()},
        tensors,
    )
    assert sum(spec.nbytes for spec in specs.values()) == 3 + 24 + 10 + 8


def test_several_files_and_their_index(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.full((5,), float(i)) for i in range(5)}  # 20 bytes each
    writer = Writer(tmp_path, {name: TensorSpec(t.dtype, (5,)) for name, t in tensors.items()}, most_bytes=45)
    for name, tensor in tensors.items():
        writer.write(name, iter([tensor]))
    writer.finish()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert index["weight_map"] == {
        "w0": files[0],
        "w1": files[0],
        "w2": files[1],
        "w3": files[1],
        "w4": files[2],
    }
    assert index["metadata"] == {"total_parameters": 25, "total_size": 100}
    assert_same_bits(read(tmp_path), tensors)
    (tmp_path / files[1]).unlink()
    with pytest.raises(ConfigError, match="this shard is missing"):
        safetensors_files.read_directory(tmp_path, field="x")


def test_broken_safetensors_files(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(4)}, file)
    whole_file = file.read_bytes()
    file.write_bytes(whole_file[:-1])
    with pytest.raises(ConfigError, match="is truncated"):
        list(safetensors_files.read_file(file))
    file.write_bytes(b"hello")
    with pytest.raises(ConfigError, match="is no safetensors file"):
        list(safetensors_files.read_file(file))
    file.write_bytes(whole_file.replace(b'"F32"', b'"F99"'))
    with pytest.raises(ConfigError, match="a type that cannot be read"):
        list(safetensors_files.read_file(file))
    for right, wrong in (
        (b"[4]", b"[5]"),
        (b"[0,16]", b"[4,16]"),
        (b'"shape"', b'"shap3"'),
        (b"[4]", b'"4"'),
    ):
        assert right in whole_file
        file.write_bytes(whole_file.replace(right, wrong))
        with pytest.raises(ConfigError, match="w cannot be what the header says"):
            list(safetensors_files.read_file(file))


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (f'{{"w": {DEEP}}}', "has no header"),
        (f'{{"w": {"9" * 5000}}}', "has no header"),
        ('{"w": {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}}', "a type that cannot be read"),
        (
            '{"w": {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]}}',
            "cannot be what the header says",
        ),
        ('{"w": {"dtype": "F32", "shape": 4, "data_offsets": [0, 16]}}', "cannot be what the header says"),
        ('{"w": {"dtype": "F32", "shape": [4], "data_offsets": [-8, 8]}}', "cannot be what the header says"),
    ],
    ids=["deep", "long number", "type", "fraction", "shape", "before the file"],
)
def test_headers_that_make_no_sense(tmp_path: Path, header: str, message: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(16))
    with pytest.raises(ConfigError, match=message):
        list(safetensors_files.read_file(file))
