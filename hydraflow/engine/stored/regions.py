"""Assembles tensors from boxes of other tensors without reading them.

In: boxes of tensors in files, and where they go. Out: a `StoredTensor` with pieces of the same files. Left
out on purpose: which boxes (`engine/megatron/saved_names.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hydraflow.engine.stored.pieces import Piece, Shape, StoredTensor
from hydraflow.errors import ConfigError


@dataclass(frozen=True)
class Region:
    """A box of a new tensor, and the box of another tensor that it is taken from. One of the two may have
    extra leading dimensions of size 1."""

    start: Shape
    shape: Shape
    source: StoredTensor
    source_start: Shape


def assembled(name: str, shape: Shape, regions: Sequence[Region]) -> StoredTensor:
    """The tensor that the regions make up. Raises ConfigError when their dtypes differ, or when a region is
    not contiguous in its file."""
    dtypes = dict.fromkeys(region.source.dtype for region in regions)
    if len(dtypes) > 1:
        raise ConfigError.one(name, None, f"its parts are of different types: {', '.join(map(str, dtypes))}")
    pieces = tuple(piece for region in regions for piece in _pieces(region))
    return StoredTensor(name, next(iter(dtypes)), shape, pieces)


def _pieces(region: Region) -> Iterator[Piece]:
    """A piece of the new tensor for each of the source's pieces that the region overlaps."""
    front = len(region.source.shape) - len(region.shape)
    box = (1,) * front + region.shape[max(0, -front) :]
    ends = tuple(start + size for start, size in zip(region.source_start, box, strict=True))
    for piece in region.source.pieces:
        low = tuple(map(max, region.source_start, piece.start))
        high = tuple(min(end, at + size) for end, at, size in zip(ends, piece.start, piece.shape))
        if any(a >= b for a, b in zip(low, high)):
            continue
        size = tuple(b - a for a, b in zip(low, high))
        if not _is_contiguous(size, piece.shape):
            cut = f"{list(size)} of a piece {list(piece.shape)} of {region.source.name}"
            raise ConfigError.one(str(piece.byte_range.file), None, f"{cut} is not contiguous")
        moved = tuple(a - b for a, b in zip(low, region.source_start))
        at = _aligned(moved, front, fill=0)
        yield Piece(
            tuple(a + b for a, b in zip(region.start, at, strict=True)),
            _aligned(size, front, fill=1),
            piece.byte_range,
            archived=piece.archived,
            strides=piece.strides,
            skip=piece.skip + _flat_index(tuple(a - b for a, b in zip(low, piece.start)), piece.shape),
            saved=piece.saved or piece.shape,
        )


def _aligned(box: Shape, front: int, *, fill: int) -> Shape:
    """Without the first `front` dimensions, or with -front leading ones added."""
    return box[front:] if front >= 0 else (fill,) * -front + box


def _is_contiguous(size: Shape, whole: Shape) -> bool:
    """Whether a box of that size is contiguous in the whole tensor.

    >>> _is_contiguous((1, 2, 5), (3, 4, 5)), _is_contiguous((2, 2, 5), (3, 4, 5))
    (True, False)
    """
    cut = [dim for dim, (a, b) in enumerate(zip(size, whole)) if a != b]
    return all(one == 1 for one in size[: cut[-1]]) if cut else True


def _flat_index(at: Shape, shape: Shape) -> int:
    return sum(a * math.prod(shape[dim + 1 :]) for dim, a in enumerate(at))
