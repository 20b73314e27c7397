"""Boxes of tensors in files as new tensors: the numbers are those that indexing gives."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydraflow.engine.stored.pieces import ByteRange, Piece, StoredTensor, whole
from hydraflow.engine.stored.regions import Region, assembled
from hydraflow.errors import ConfigError


def stored(tensor: torch.Tensor, folder: Path, cuts: int, transposed: bool = False) -> StoredTensor:
    """A tensor whose rows and columns (the last two dimensions) are in `cuts` pieces each, one file for each,
    as torch.save writes them."""
    pieces = []
    grid = itertools.product(range(tensor.shape[0] if tensor.dim() == 3 else 1), range(cuts), range(cuts))
    for layer, row, column in grid:
        rows, columns = (size // cuts for size in tensor.shape[-2:])
        start = (row * rows, column * columns)
        piece = (tensor[layer : layer + 1] if tensor.dim() == 3 else tensor)[
            ..., start[0] : start[0] + rows, start[1] : start[1] + columns
        ].contiguous()
        if transposed:
            piece = piece.mT.contiguous().mT
        file = folder / f"{layer}-{row}-{column}"
        torch.save(piece, file)
        byte_range = ByteRange(file, 0, file.stat().st_size)
        front = (layer,) if tensor.dim() == 3 else ()
        pieces.append(Piece((*front, *start), tuple(piece.shape), byte_range, archived=True))
    return StoredTensor("saved", tensor.dtype, tuple(tensor.shape), tuple(pieces))


@settings(max_examples=30, deadline=None)
@given(
    layer=st.integers(0, 2),
    first=st.integers(0, 7),
    count=st.integers(1, 8),
    cuts=st.sampled_from([1, 2, 4]),
    transposed=st.booleans(),
)
def test_rows_of_a_layer_of_a_stack(layer: int, first: int, count: int, cuts: int, transposed: bool) -> None:
    """Twice, the second time upside down: rows of rows."""
    stack = torch.arange(3 * 8 * 4, dtype=torch.float32).view(3, 8, 4)
    last = min(8, first + count)
    with tempfile.TemporaryDirectory() as folder:
        source = stored(stack, Path(folder), cuts, transposed)
        rows = assembled(
            "rows", (last - first, 4), [Region((0, 0), (last - first, 4), source, (layer, first, 0))]
        )
        assert torch.equal(whole(rows), stack[layer, first:last])
        size = last - first
        regions = [Region((size - 1 - row, 0), (1, 4), rows, (row, 0)) for row in range(size)]
        assert torch.equal(whole(assembled("turned", (size, 4), regions)), stack[layer, first:last].flip(0))


def test_a_stack_is_made_of_its_layers(tmp_path: Path) -> None:
    layers = torch.randn(2, 6, 4).unbind()
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    sources = [stored(layer, tmp_path / str(number), 2) for number, layer in enumerate(layers)]
    regions = [Region((number, 0, 0), (1, 6, 4), source, (0, 0)) for number, source in enumerate(sources)]
    assert torch.equal(whole(assembled("stack", (2, 6, 4), regions)), torch.stack(layers))


def test_what_is_not_one_range_of_a_file_is_refused(tmp_path: Path) -> None:
    source = stored(torch.randn(4, 4), tmp_path, 1)
    with pytest.raises(ConfigError, match=r"\[4, 2\] of a piece \[4, 4\] of saved is not contiguous"):
        assembled("columns", (4, 2), [Region((0, 0), (4, 2), source, (0, 1))])


def test_parts_of_different_types_are_refused(tmp_path: Path) -> None:
    sources = [StoredTensor("a", dtype, (2,), ()) for dtype in (torch.float32, torch.bfloat16)]
    regions = [Region((at * 2,), (2,), source, (0,)) for at, source in enumerate(sources)]
    with pytest.raises(ConfigError, match=r"different types: torch.float32, torch.bfloat16"):
        assembled("both", (4,), regions)
