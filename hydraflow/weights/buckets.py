"""Buckets: a model's weights in parts of bounded size, with a checksum for each where one is wanted.

In: a stream of (Hugging Face name, full tensor) pairs. Out: `Bucket`s, and from a bucket the pairs again. A
checksum is taken from the sender's bytes; the receiver takes its own from the tensors that it holds after
loading. Left out on purpose: the way that the bytes travel (`dispatch/transport.py`), who gathers them
(`engine/`), and what loads them (`generation/`).
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

NamedTensor = tuple[str, torch.Tensor]
ALIGNMENT = 16
"""Bytes: the largest size of an element."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a bucket."""

    name: str
    """Hugging Face name."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """What a bucket holds."""

    version: int
    """Training steps that made the weights."""
    number: int
    """From 0, in order."""
    last: bool
    """Whether no more follow."""
    entries: tuple[Entry, ...]
    checksum: int | None
    """`checksum_of` the tensors; None: not taken."""

    def to_json(self) -> bytes:
        """For `from_json`."""
        entries = [[entry.name, str(entry.dtype), list(entry.shape)] for entry in self.entries]
        return json.dumps([self.version, self.number, self.last, entries, self.checksum]).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Header:
        """The header again.

        >>> header = Header(3, 0, True, (Entry("a", torch.bfloat16, (2, 4)),), 7)
        >>> Header.from_json(header.to_json()) == header
        True
        """
        version, number, last, listed, checksum = json.loads(text)
        entries = [
            Entry(name, getattr(torch, dtype.removeprefix("torch.")), tuple(shape))
            for name, dtype, shape in listed
        ]
        return cls(version, number, last, tuple(entries), checksum)

    def arrived_as(self, held: Mapping[str, torch.Tensor]) -> bool:
        """Whether a receiver's tensors are those that were sent, by their checksum; held ones of another type
        are converted first."""
        return self.checksum == checksum_of(held[entry.name].to(entry.dtype) for entry in self.entries)


@dataclass(frozen=True)
class Bucket:
    """Some of the weights of one version, in memory that need not be contiguous: pickled, the bytes are not
    copied."""

    header: Header
    arrays: tuple[np.ndarray, ...]
    """The bytes of each entry, in host memory: uint8 (nbytes,)."""

    def tensors(self) -> Iterator[NamedTensor]:
        """The pairs again; the tensors share the arrays' memory, which may be read-only."""
        for entry, array in zip(self.header.entries, self.arrays, strict=True):
            yield entry.name, _as_tensor(array, entry)


@dataclass(frozen=True)
class FlatBucket:
    """Some of the weights of one version, end to end in one tensor in host memory."""

    header: Header
    flat: torch.Tensor
    """uint8 (`flat_size` of the header,)."""

    @classmethod
    def of(cls, header: Header, tensors: Sequence[torch.Tensor]) -> FlatBucket:
        """Copies the tensors."""
        flat = torch.empty(flat_size(header), dtype=torch.uint8)
        for entry, start, tensor in zip(header.entries, _starts(header), tensors, strict=False):
            flat[start : start + entry.nbytes].view(entry.dtype).copy_(tensor.reshape(-1))
        return cls(header, flat)

    def tensors(self) -> Iterator[NamedTensor]:
        """The pairs again, as views."""
        for entry, start in zip(self.header.entries, _starts(self.header), strict=False):
            part = self.flat[start : start + entry.nbytes]
            yield entry.name, part.view(entry.dtype).view(entry.shape)


def flat_size(header: Header) -> int:
    """Bytes of a flat bucket."""
    return _starts(header)[-1]


def buckets(stream: Iterable[NamedTensor], how: Cut) -> Iterator[Bucket | None]:
    """Buckets as `cut` makes them; None where another rank sends them."""
    for header, tensors in cut(stream, how):
        bucket = None if header is None else Bucket(header, tuple(map(_as_bytes, tensors)))
        tensors.clear()  # while the next bucket is gathered
        yield bucket
        del bucket


@dataclass(frozen=True)
class Cut:
    """How weights are cut into buckets."""

    version: int
    max_bytes: int
    dtype: torch.dtype
    """Floating-point weights are converted to it."""
    checked: bool
    """With checksums, which take about as long as copying the weights several times."""


def cut(stream: Iterable[NamedTensor], how: Cut) -> Iterator[tuple[Header | None, list[torch.Tensor]]]:
    """Header and tensors of each bucket: up to `how.max_bytes`, one tensor at least. The list is the
    caller's, to be cleared when it is done with them.

    Where the stream's tensors are on the meta device, another rank sends them: no header.
    """
    number, size, part = 0, 0, list[NamedTensor]()
    for name, tensor in stream:
        sent = tensor.detach().to(how.dtype) if tensor.is_floating_point() else tensor.detach()
        nbytes = sent.numel() * sent.element_size()
        if part and size + nbytes > how.max_bytes:
            header, tensors = _header(part, how, number, last=False), [held for _, held in part]
            part.clear()
            yield header, tensors
            number, size = number + 1, 0
        part.append((name, sent))
        size += nbytes
    assert part, "a model has weights"
    yield _header(part, how, number, last=True), [held for _, held in part]


def _header(part: Sequence[NamedTensor], how: Cut, number: int, *, last: bool) -> Header | None:
    if any(tensor.is_meta for _, tensor in part):
        return None
    entries = tuple(Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in part)
    checksum = checksum_of(tensor for _, tensor in part) if how.checked else None
    return Header(how.version, number, last, entries, checksum)


def _starts(header: Header) -> list[int]:
    """Where each entry begins in a flat bucket, and where the last one ends; a dtype's view must begin at a
    multiple of its size."""
    starts = [0]
    for entry in header.entries:
        starts.append(-(-(starts[-1] + entry.nbytes) // ALIGNMENT) * ALIGNMENT)
    return starts


def checksum_of(tensors: Iterable[torch.Tensor]) -> int:
    """CRC-32 of the tensors' bytes, one after the other.

    >>> one, two = torch.tensor([1.0]), torch.tensor([2.0])
    >>> checksum_of([one, two]) == checksum_of([torch.tensor([1.0, 2.0])]) != checksum_of([two, one])
    True
    """
    found = 0
    for tensor in tensors:
        found = zlib.crc32(_as_bytes(tensor).data, found)
    return found


def _as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """uint8 (nbytes,); a view where the tensor is contiguous and on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _as_tensor(array: np.ndarray, entry: Entry) -> torch.Tensor:
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=entry.dtype)
    # from_dlpack accepts read-only memory without a warning
    return torch.from_dlpack(array).view(entry.dtype).view(entry.shape)
