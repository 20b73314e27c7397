"""Tensors of a distributed checkpoint's index as tensors in files, and what is missing of the files.

In: an `Index` (`dcp_index.py`) and its folder. Out: `StoredTensor`s. Left out on purpose: which of them are
weights (`megatron.py`, `model_merger/dcp.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from hydraflow.engine.dcp_index import INDEX, Index, IndexedTensor
from hydraflow.engine.stored.pieces import ByteRange, Piece, StoredTensor
from hydraflow.errors import Problem


def last_writer(index: Index) -> int:
    """The last rank that wrote a file."""
    named = (re.fullmatch(r"__(\d+)_\d+\.distcp", name) for name in index.ends)
    return max((int(found[1]) for found in named if found), default=0)


def missing_parts(tensors: Iterable[StoredTensor], index: Index, folder: Path) -> Iterator[Problem]:
    """Missing or truncated files, and tensors that their pieces do not cover."""
    for name, end in sorted(index.ends.items()):
        if not (folder / name).is_file():
            rule = f"this shard is missing; the index expects {end} bytes of it"
            yield Problem(str(folder / name), None, rule)
        elif (size := (folder / name).stat().st_size) < end:
            yield Problem(str(folder / name), None, f"is truncated: {size} of {end} bytes")
    for tensor in tensors:
        if hole := tensor.holes():
            yield Problem(str(folder / INDEX), None, hole)


def stored(name: str, found: IndexedTensor, folder: Path) -> StoredTensor:
    """A tensor of the index whose files are in `folder`."""
    pieces = []
    for chunk in found.chunks:
        byte_range = ByteRange(folder / chunk.place.file, chunk.place.offset, chunk.place.length)
        pieces.append(Piece(chunk.start, chunk.shape, byte_range, archived=True))
    return StoredTensor(name, found.dtype, found.shape, tuple(pieces))


def count(others: dict[str, tuple[int, int]], part: str, size: int) -> None:
    """Adds an entry to its part's count and bytes."""
    entries, before = others.get(part, (0, 0))
    others[part] = (entries + 1, before + size)
