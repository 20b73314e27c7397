"""Buckets: a model's weights in chunks of bounded size, with optional checksums.

In: a stream of (Hugging Face name, full tensor) pairs. Out: `FlatBucket`s, and a bucket's pairs. A weight
larger than a bucket is sent as several `Part`s, in order, each of which fits. A checksum is taken from the
sender's bytes; the receiver takes its own from the tensors that it holds after loading. Left out on purpose:
transport (`slots.py`, `engine/broadcast_group.py`), gathering (`engine/`), and loading (`generation/`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

NamedTensor = tuple[str, torch.Tensor]
ALIGNMENT = 16
"""Bytes; at least the size of any element."""
CHUNK = 2**22
"""Chunk size, in numbers, of the conversion and host copy for a checksum."""


@dataclass(frozen=True)
class Part:
    """A range of a weight that is larger than a bucket."""

    numbers: torch.Tensor
    """(n,)"""
    start: int
    """Offset in the flattened weight (row-major)."""
    shape: torch.Size
    """Shape of the whole weight."""

    @property
    def end(self) -> int:
        return self.start + len(self.numbers)

    @property
    def is_last(self) -> bool:
        return self.end == self.shape.numel()

    def place_in(self, weight: torch.Tensor) -> torch.Tensor:
        """The part's range of a contiguous weight, as a view (n,)."""
        return weight.view(-1)[self.start : self.end]


Weight = tuple[str, torch.Tensor | Part]
"""Hugging Face name, and the full tensor or its next part."""


@dataclass(frozen=True)
class Entry:
    """One weight of a bucket, or a part of one."""

    name: str
    """Hugging Face name."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the whole weight."""
    start: int
    end: int
    """Offsets of its range in the flattened weight (row-major)."""

    @property
    def nbytes(self) -> int:
        return (self.end - self.start) * self.dtype.itemsize

    def weight_of(self, numbers: torch.Tensor) -> Weight:
        """numbers: (end - start,)."""
        shape = torch.Size(self.shape)
        if len(numbers) == shape.numel():
            return self.name, numbers.view(shape)
        return self.name, Part(numbers, self.start, shape)


@dataclass(frozen=True)
class Header:
    """The contents of a bucket."""

    version: int
    """Version of the weights: number of training steps."""
    number: int
    """From 0, in order."""
    last: bool
    """Whether it is the last bucket."""
    entries: tuple[Entry, ...]
    checksums: Mapping[str, int]
    """Weight -> `checksum_of` it, for weights that end in this bucket; empty: no checksums."""

    def to_json(self) -> bytes:
        """The inverse of `from_json`."""
        entries = [[one.name, str(one.dtype), list(one.shape), one.start, one.end] for one in self.entries]
        return json.dumps([self.version, self.number, self.last, entries, self.checksums]).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Header:
        """The inverse of `to_json`.

        >>> header = Header(3, 0, True, (Entry("a", torch.bfloat16, (2, 4), 0, 8),), {"a": 7})
        >>> Header.from_json(header.to_json()) == header
        True
        """
        version, number, last, listed, checksums = json.loads(text)
        entries = [
            Entry(name, getattr(torch, dtype.removeprefix("torch.")), tuple(shape), start, end)
            for name, dtype, shape, start, end in listed
        ]
        return cls(version, number, last, tuple(entries), checksums)

    def differing(
        self, held: Mapping[str, torch.Tensor], compares: Callable[[str], bool] = lambda name: True
    ) -> list[str]:
        """Names of weights whose checksum differs from the receiver's, after conversion to the sent dtype;
        of those that `compares` selects. All are read, because reading may be a collective."""
        types = {entry.name: entry.dtype for entry in self.entries}
        sums = {name: sent for name, sent in self.checksums.items() if compares(name)}
        return [name for name, sent in sums.items() if checksum_of(held[name], types[name]) != sent]


@dataclass(frozen=True)
class FlatBucket:
    """Weights of one version, concatenated in one tensor."""

    header: Header
    flat: torch.Tensor
    """uint8 (`flat_size` of the header,), or longer; may be read-only."""

    @classmethod
    def of(cls, header: Header, numbers: Sequence[torch.Tensor], memory: Memory) -> FlatBucket:
        flat = memory.take(flat_size(header))
        for entry, start, values in zip(header.entries, _starts(header), numbers, strict=False):
            flat[start : start + entry.nbytes].view(entry.dtype).copy_(values)
        return cls(header, flat)

    def weights(self) -> Iterator[Weight]:
        """The weights, as views."""
        for entry, start in zip(self.header.entries, _starts(self.header), strict=False):
            yield entry.weight_of(self.flat[start : start + entry.nbytes].view(entry.dtype))


class Memory(Protocol):
    """Reusable memory for one flat bucket at a time."""

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 (nbytes,); invalidates the previous result."""


class BucketMemory:
    """`Memory` in this process. Allocating each bucket separately would fragment the heap, because small
    objects would occupy the freed space."""

    def __init__(self, device: torch.device) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, nbytes: int) -> torch.Tensor:
        if len(self._flat) < nbytes:
            self._flat = self._flat.new_empty(0)  # frees the old one first
            self._flat = self._flat.new_empty(nbytes)
        return self._flat[:nbytes]


def flat_size(header: Header) -> int:
    """Bytes of a flat bucket."""
    return _starts(header)[-1]


NEVER_ROUNDED = ("e_score_correction_bias", "expert_bias")
"""Ends of the names of router biases. Every engine keeps them in float32, because rounded ones would
choose other experts."""


def sent_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a weight is sent to an engine that computes in `dtype`."""
    keeps = not tensor.is_floating_point() or name.endswith(NEVER_ROUNDED)
    return tensor.dtype if keeps else dtype


@dataclass(frozen=True)
class BucketOptions:
    """How weights are split into buckets."""

    version: int
    max_bytes: int
    dtype: torch.dtype
    """Floating-point weights are converted to it (`sent_dtype`)."""
    checked: bool
    """Whether to compute checksums, which takes about as long as copying the weights several times."""

    def entries(self, name: str, tensor: torch.Tensor) -> Iterator[Entry]:
        """One entry for a weight that fits into a bucket, otherwise as few as possible."""
        dtype = sent_dtype(name, tensor, self.dtype)
        most, count = max(1, self.max_bytes // dtype.itemsize), tensor.numel()
        for start in range(0, max(1, count), most):
            yield Entry(name, dtype, tuple(tensor.shape), start, min(start + most, count))


def into_buckets(
    stream: Iterable[NamedTensor], options: BucketOptions
) -> Iterator[tuple[Header | None, list[torch.Tensor]]]:
    """Header of each bucket, and the numbers of its entries, (n,) each: up to `options.max_bytes`. The caller
    owns the list, and should clear it when done.

    The header is None if the stream's tensors are on the meta device: another rank sends them.
    """
    bucket = _OpenBucket(options.version, 0)
    for name, tensor in stream:
        numbers = tensor.detach().reshape(-1)
        for entry in options.entries(name, tensor):
            if bucket.entries and bucket.nbytes + entry.nbytes > options.max_bytes:
                yield bucket.close(last=False)
                bucket = _OpenBucket(options.version, bucket.number + 1)
            bucket.add(entry, numbers)
            if options.checked and entry.end == len(numbers) and not tensor.is_meta:
                bucket.checksums[name] = checksum_of(numbers, entry.dtype)
        del tensor, numbers  # frees them while the next one is gathered
    assert bucket.entries, "the stream has no weights"
    yield bucket.close(last=True)


@dataclass
class _OpenBucket:
    """A bucket that is being filled."""

    version: int
    number: int
    entries: list[Entry] = field(default_factory=list)
    numbers: list[torch.Tensor] = field(default_factory=list)
    checksums: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, entry: Entry, weight: torch.Tensor) -> None:
        """Adds an entry. weight: the flattened full tensor."""
        self.entries.append(entry)
        piece = weight[entry.start : entry.end].to(entry.dtype)
        if (
            entry.start > 0
            and entry.end == len(weight)
            and piece.data_ptr() == weight[entry.start :].data_ptr()
        ):
            piece = piece.clone()  # a view would keep the whole weight while the next one is gathered
        self.numbers.append(piece)
        self.nbytes += entry.nbytes

    def close(self, *, last: bool) -> tuple[Header | None, list[torch.Tensor]]:
        """The bucket as `into_buckets` yields it; drops its own reference to the numbers."""
        numbers, self.numbers = self.numbers, []
        if any(values.is_meta for values in numbers):
            return None, numbers
        return Header(self.version, self.number, last, tuple(self.entries), self.checksums), numbers


def _starts(header: Header) -> list[int]:
    """Offset of each entry in a flat bucket, and the end of the last; aligned, because a dtype's view must
    start at a multiple of its size."""
    starts = [0]
    for entry in header.entries:
        starts.append(-(-(starts[-1] + entry.nbytes) // ALIGNMENT) * ALIGNMENT)
    return starts


def checksum_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """CRC-32 of the tensor's bytes in row-major order, after conversion.

    >>> one = torch.tensor([1.0, 2.0])
    >>> checksum_of(one) == checksum_of(one.bfloat16(), torch.float32) != checksum_of(one.flip(0))
    True
    """
    checksum = 0
    for chunk in tensor.detach().reshape(-1).split(CHUNK):
        checksum = zlib.crc32(chunk.to(dtype or chunk.dtype).cpu().view(torch.uint8).numpy().data, checksum)
    return checksum
