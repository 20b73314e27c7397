"""Tensors in files: where their pieces are, and how to read them a block of rows at a time.

In: boxes of a tensor and the byte ranges that hold them. Out: blocks of rows, copied into memory. Nothing is
memory-mapped, so only the block counts towards this process's memory. Left out on purpose: formats
(`megatron.py`, and in `model_merger/` `dcp.py`, `verl.py`, `safetensors_files.py`).
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hydraflow.errors import ConfigError, first_line

UNREADABLE = (RuntimeError, EOFError, OSError, ValueError, AttributeError, TypeError, LookupError)
"""What torch.load may raise for a broken file."""
BLOCK_BYTES = 8 * 2**20
"""Maximum bytes of a block, except that a block has at least one row."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ByteRange:
    """A range of bytes in a file."""

    file: Path
    offset: int
    length: int


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, from index `start`."""

    start: Shape
    shape: Shape
    byte_range: ByteRange
    """The raw numbers, or the output of torch.save that contains them."""
    archived: bool = False
    """The byte range is the output of torch.save."""
    strides: Shape | None = None
    """Strides of the numbers when they are not contiguous."""
    skip: int = 0
    """Numbers of the byte range that come before the piece."""
    saved: Shape | None = None
    """Shape of the tensor in the byte range; None: the piece's shape."""

    def opened(self, dtype: torch.dtype) -> Piece:
        """The same piece, with the byte range of its raw numbers. Raises ConfigError when the file holds
        something else."""
        if not self.archived:
            return self
        found, wanted = _load_shape(self.byte_range), self.saved or self.shape
        if tuple(found.shape) != wanted or found.dtype != dtype:
            there = f"{found.dtype} {list(found.shape)} at byte {self.byte_range.offset}"
            rule = f"holds {there}, but the index says {dtype} {list(wanted)}"
            raise ConfigError.one(str(self.byte_range.file), None, rule)
        inner = numbers_of(found, self.byte_range.file)
        byte_range = replace(inner, offset=self.byte_range.offset + inner.offset)
        return replace(self, byte_range=byte_range, archived=False, strides=odd_strides(found))

    def has_rows(self, first: int, last: int) -> bool:
        """Whether it has any of the tensor's rows first..last (exclusive)."""
        start, size = (self.start or (0,))[0], (self.shape or (1,))[0]
        return max(first, start) < min(last, start + size)

    def rows(self, first: int, last: int, into: torch.Tensor) -> None:
        """Fills `into` with the piece's own rows first..last (exclusive)."""
        if self.strides is not None:
            numbers = torch.empty(self.byte_range.length // into.element_size(), dtype=into.dtype)
            read_numbers(self.byte_range.file, self.byte_range.offset, numbers)
            saved = numbers.as_strided(self.saved or self.shape, self.strides).reshape(-1)
            into.copy_(saved[self.skip :][: math.prod(self.shape)].view(self.shape)[first:last])
            return
        before = (self.skip + first * math.prod(self.shape[1:])) * into.element_size()
        whole = into if into.is_contiguous() else torch.empty(into.shape, dtype=into.dtype)
        read_numbers(self.byte_range.file, self.byte_range.offset + before, whole)
        if whole is not into:
            into.copy_(whole)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor whose pieces are in files, read on demand."""

    name: str
    dtype: torch.dtype
    shape: Shape
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """Bytes of its pieces in files."""
        return sum(piece.byte_range.length for piece in self.pieces)

    def blocks(self) -> Iterator[torch.Tensor]:
        """Its rows (first dimension) in order, a block at a time; a scalar is one row."""
        return self.blocks_between(0, (self.shape or (1,))[0])

    def blocks_between(self, first: int, last: int) -> Iterator[torch.Tensor]:
        """Rows first..last (exclusive) in order, a block at a time."""
        here = [piece for piece in self.pieces if piece.has_rows(first, last)]
        located = replace(self, pieces=tuple(piece.opened(self.dtype) for piece in here))
        for start, end in block_rows((last - first, *self.shape[1:]), self.dtype):
            yield located.rows(first + start, first + end)

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Reads rows first..last (exclusive) into memory."""
        shape = self.shape or (1,)
        block = torch.empty((last - first, *shape[1:]), dtype=self.dtype)
        for piece in (piece for piece in self.pieces if piece.has_rows(first, last)):
            start, size = piece.start or (0,), piece.shape or (1,)
            low, high = max(first, start[0]), min(last, start[0] + size[0])
            box = [slice(low - first, high - first), *(slice(s, s + n) for s, n in zip(start[1:], size[1:]))]
            flat = replace(piece.opened(self.dtype), shape=size)
            flat.rows(low - start[0], high - start[0], block[tuple(box)])
        return block

    def holes(self) -> str | None:
        """Why the pieces do not cover the tensor, or None."""
        for piece in self.pieces:
            ends = zip(piece.start, piece.shape, self.shape, strict=True)
            if any(start + size > whole for start, size, whole in ends):
                beyond = f"reaches beyond the tensor's shape {list(self.shape)}"
                return f"{self.name}: a piece at {list(piece.start)} {beyond}"
        covered = sum(math.prod(piece.shape) for piece in self.pieces)
        distinct = len({piece.start for piece in self.pieces}) == len(self.pieces)
        if covered == math.prod(self.shape) and distinct:
            return None
        wanted = f"its shape {list(self.shape)} has {math.prod(self.shape)}"
        return f"{self.name}: its pieces hold {covered} numbers, {wanted}"


def block_rows(shape: Shape, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """(first, last) row of each block of a tensor.

    >>> list(block_rows((5, 2**20), torch.float32))
    [(0, 2), (2, 4), (4, 5)]
    """
    rows = shape[0] if shape else 1
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    step = max(1, BLOCK_BYTES // row_bytes) if row_bytes else max(rows, 1)
    for first in range(0, rows, step):
        yield first, min(rows, first + step)


def whole(source: StoredTensor) -> torch.Tensor:
    full = torch.empty(source.shape, dtype=source.dtype)
    rows = full if source.shape else full.view(1)
    at = 0
    for block in source.blocks():
        rows[at : at + len(block)] = block
        at += len(block)
    return full


def same(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two tensors hold the same bits: NaN equals itself, and zero is not minus zero."""
    if first.pieces == second.pieces:
        return True
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    pairs = zip(first.blocks(), second.blocks(), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def read_numbers(file: Path, offset: int, into: torch.Tensor) -> None:
    """Fills a contiguous tensor from a range of a file. Raises ConfigError when the file is too short."""
    if not into.numel():
        return
    view = into.reshape(-1).view(torch.uint8).numpy().data
    descriptor = os.open(file, os.O_RDONLY)
    try:
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done:]], offset + done)
            if count == 0:
                rule = f"is truncated: it ends at byte {offset + done} of {offset + len(view)}"
                raise ConfigError.one(str(file), None, rule)
            done += count
    finally:
        os.close(descriptor)


def numbers_of(tensor: torch.Tensor, file: Path) -> ByteRange:
    """The bytes of a tensor in its file, up to the last number that the tensor uses. tensor: from
    `torch.load(..., map_location="meta")`, which reads no numbers."""
    begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if begin is None:
        rule = "was not written by torch.save of version 1.6 or newer"
        raise ConfigError.one(str(file), None, rule)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    count, number = last + 1 if tensor.numel() else 0, tensor.element_size()
    return ByteRange(file, begin + tensor.storage_offset() * number, count * number)


def odd_strides(tensor: torch.Tensor) -> Shape | None:
    """The tensor's strides unless it is contiguous."""
    return None if tensor.is_contiguous() else tuple(tensor.stride())


def _load_shape(byte_range: ByteRange) -> torch.Tensor:
    """A tensor that torch.save wrote into a range of a file, without its numbers."""
    try:
        with byte_range.file.open("rb") as opened:
            found = torch.load(
                io.BufferedReader(_Window(opened.fileno(), byte_range)),
                map_location="meta",
                weights_only=True,
            )
    except (*UNREADABLE, pickle.UnpicklingError) as error:
        rule = f"cannot be read at byte {byte_range.offset}: {first_line(error)}"
        raise ConfigError.one(str(byte_range.file), None, rule) from error
    if not isinstance(found, torch.Tensor):
        rule = f"holds a {type(found).__name__} at byte {byte_range.offset}, not a tensor"
        raise ConfigError.one(str(byte_range.file), None, rule)
    return found


class _Window(io.RawIOBase):
    """A range of an open file, readable like a whole file."""

    def __init__(self, descriptor: int, byte_range: ByteRange):
        self._descriptor, self._extent, self._at = descriptor, byte_range, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._extent.length}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = memoryview(buffer)[: max(0, self._extent.length - self._at)]
        count = os.preadv(self._descriptor, [part], self._extent.offset + self._at) if len(part) else 0
        self._at += count
        return count
