"""Buckets: a model's weights in parts of bounded size, with a checksum for each where one is wanted.

In: a stream of (Hugging Face name, full tensor) pairs. Out: `Bucket`s, and from a bucket the pairs again. A
checksum is taken from the sender's bytes; the receiver takes its own from the tensors that it holds after
loading. Left out on purpose: the way that the bytes travel (`dispatch/transport.py`), who gathers them
(`engine/`), and what loads them (`generation/`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

NamedTensor = tuple[str, torch.Tensor]


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
class Bucket:
    """Some of the weights of one version, in host memory."""

    version: int
    """Training steps that made them."""
    number: int
    """From 0, in order."""
    last: bool
    """Whether no more follow."""
    entries: tuple[Entry, ...]
    arrays: tuple[np.ndarray, ...]
    """The bytes of each entry: uint8 (nbytes,)."""
    checksum: int | None
    """`checksum_of` the tensors; None: not taken."""

    def tensors(self) -> Iterator[NamedTensor]:
        """The pairs again; the tensors share the arrays' memory, which may be read-only."""
        for entry, array in zip(self.entries, self.arrays, strict=True):
            yield entry.name, _as_tensor(array, entry)

    def arrived_as(self, held: Mapping[str, torch.Tensor]) -> bool:
        """Whether a receiver's tensors are those that were sent, by their checksum; held ones of another type
        are converted first."""
        return self.checksum == checksum_of(held[entry.name].to(entry.dtype) for entry in self.entries)


def buckets(
    stream: Iterable[NamedTensor], *, version: int, max_bytes: int, dtype: torch.dtype, checked: bool
) -> Iterator[Bucket | None]:
    """Buckets of up to `max_bytes`, one tensor at least, with floating-point weights converted to `dtype`.
    checked: with checksums, which take about as long as copying the weights several times.

    Where the stream's tensors are on the meta device, another rank sends them: None for each bucket.
    """
    number, size, part = 0, 0, list[NamedTensor]()
    for name, tensor in stream:
        sent = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
        nbytes = sent.numel() * sent.element_size()
        if part and size + nbytes > max_bytes:
            yield _bucket(part, version, number, last=False, checked=checked)
            number, size, part = number + 1, 0, []
        part.append((name, sent))
        size += nbytes
    assert part, "a model has weights"
    yield _bucket(part, version, number, last=True, checked=checked)


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


def _bucket(
    part: Sequence[NamedTensor], version: int, number: int, *, last: bool, checked: bool
) -> Bucket | None:
    if any(tensor.is_meta for _, tensor in part):
        return None
    entries = tuple(Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in part)
    arrays = tuple(_as_bytes(tensor) for _, tensor in part)
    checksum = checksum_of(tensor for _, tensor in part) if checked else None
    return Bucket(version, number, last, entries, arrays, checksum)


def _as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """uint8 (nbytes,); a view where the tensor is contiguous and on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _as_tensor(array: np.ndarray, entry: Entry) -> torch.Tensor:
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=entry.dtype)
    # from_dlpack accepts read-only memory without a warning
    return torch.from_dlpack(array).view(entry.dtype).view(entry.shape)
