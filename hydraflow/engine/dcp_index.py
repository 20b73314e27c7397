"""The index of a distributed checkpoint, `dcp/.metadata`: a pickle, read without running what it names.

In: a role's checkpoint. Out: its tensors and the places of their pieces, as plain, validated values. Every
type that an index contains becomes an `InertRecord`; any other name is refused. torch's own reader would
unpickle the file: `dcp_reader.py` gives it an index built from these values instead.
Left out on purpose: the pieces themselves; torch.distributed, which `model_merger` must not need.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hydraflow.engine.inert import record_type
from hydraflow.engine.stored.pieces import ByteRange, Piece, Shape, StoredTensor
from hydraflow.errors import ConfigError, Problem

SHARDS, INDEX = "dcp", ".metadata"
"""Folder of a role's checkpoint, and the file in it."""
LARGEST = 2**31
"""Maximum size of an index in bytes; a million pieces take 150 MB."""

_INERT = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
    "builtins": {"getattr"},  # Python 3.11.0 to 3.11.4 write an enum's member as getattr(its type, its name)
}
"""Everything that torch and Megatron-Core write to an index besides dtypes and sizes."""
_NO_INDEX = "is not the index of a distributed checkpoint"
_BROKEN = (AttributeError, TypeError, ValueError, LookupError)


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds."""

    folder: Path
    """Folder of the index and of the files that it names."""
    tensors: dict[str, StoredTensor]
    objects: dict[str, int]
    """Size in bytes of each pickled object other than a tensor; these are never read."""
    ends: dict[str, int]
    """File -> its minimum size in bytes."""

    @property
    def last_writer(self) -> int:
        """The last rank that wrote a file."""
        named = (re.fullmatch(r"__(\d+)_\d+\.distcp", name) for name in self.ends)
        return max((int(found[1]) for found in named if found), default=0)

    def missing_parts(self, tensors: Iterable[StoredTensor]) -> Iterator[Problem]:
        """Missing or truncated files, and those of these tensors that their pieces do not cover."""
        for name, end in sorted(self.ends.items()):
            file = self.folder / name
            if not file.is_file():
                yield Problem(str(file), None, f"this shard is missing; the index expects {end} bytes of it")
            elif (size := file.stat().st_size) < end:
                yield Problem(str(file), None, f"is truncated: {size} of {end} bytes")
        for tensor in tensors:
            if hole := tensor.holes():
                yield Problem(str(self.folder / INDEX), None, hole)


def read_index(checkpoint: Path, shards: str = SHARDS) -> Index:
    """The index of a role's checkpoint. shards: the folder in it that holds the index.

    Raises ConfigError when it is missing, damaged, or names a type that no index contains.
    """
    file = checkpoint / shards / INDEX
    if not file.is_file():
        raise ConfigError.one(str(file), None, "the checkpoint's index is missing")
    found = _unpickled(file)
    if not hasattr(found, "state_dict_metadata") or not hasattr(found, "storage_data"):
        rule = f"holds a {type(found).__name__}, not the index of a distributed checkpoint"
        raise ConfigError.one(str(file), None, rule)
    try:
        return _checked(found, file.parent)
    except _BROKEN as error:  # a record lacks a field, or a field has the wrong type
        raise ConfigError.one(str(file), None, f"is damaged: {error or type(error).__name__}") from error


def read_tensors_alone(checkpoint: Path) -> Index:
    """As `read_index`; also raises ConfigError for pickled objects, which torch would unpickle."""
    index = read_index(checkpoint)
    if index.objects:
        what = f"calls {min(index.objects)} a pickled object"
        rule = f"{what}, but a run saves tensors only; nothing was executed"
        raise ConfigError.one(str(checkpoint / SHARDS / INDEX), None, rule)
    return index


def _unpickled(file: Path) -> Any:
    """The unpickled index, as inert records."""
    if (size := file.stat().st_size) > LARGEST:
        raise ConfigError.one(str(file), None, f"{_NO_INDEX}: it has {size} bytes")
    data = file.read_bytes()
    try:
        _require_small_memo(data)
        return _InertUnpickler(io.BytesIO(data)).load()
    except (*_BROKEN, pickle.UnpicklingError, EOFError, MemoryError, OverflowError) as error:
        raise ConfigError.one(str(file), None, f"{_NO_INDEX}: {error}") from error


def _require_small_memo(data: bytes) -> None:
    """Raises UnpicklingError for a memo index larger than the file can justify.

    Nine bytes can request 64 GB: pickle grows its memo up to that index.
    """
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name.endswith("PUT") and isinstance(argument, int) and argument > len(data):
            raise pickle.UnpicklingError(f"its memo index {argument} is too large for {len(data)} bytes")


class _InertUnpickler(pickle.Unpickler):
    """Creates only records, tuples and dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for the named type."""
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("torch", "Size"):
            return tuple
        if name in _INERT.get(module, ()):
            return record_type(name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index holds; nothing was executed")


def _checked(found: Any, folder: Path) -> Index:
    """The index in plain values. Raises one of `_BROKEN` for a damaged one."""
    places: dict[str, dict[Shape, ByteRange]] = {}
    ends: dict[str, int] = {}
    for key, info in found.storage_data.items():
        place = _place(info, folder)
        places.setdefault(key.fqn, {})[_shape(getattr(key, "offset", None) or ())] = place
        ends[place.file.name] = max(ends.get(place.file.name, 0), place.offset + place.length)
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, int] = {}
    for name, entry in found.state_dict_metadata.items():
        held = places.get(name, {})
        if not isinstance(name, str):
            raise ValueError(f"the name of a tensor is a {type(name).__name__}")
        if hasattr(entry, "chunks"):
            tensors[name] = _tensor(name, entry, held)
        else:
            objects[name] = sum(place.length for place in held.values())
    return Index(folder, tensors, objects, ends)


def _place(info: Any, folder: Path) -> ByteRange:
    name = info.relative_path
    if not isinstance(name, str):
        raise ValueError(f"the name of a file is a {type(name).__name__}")
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"it names the file {name[:80]!r}, which is not beside it")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"{name} is compressed or otherwise transformed, which cannot be read")
    return ByteRange(folder / name, _count(info.offset), _count(info.length))


def _tensor(name: str, entry: Any, places: Mapping[Shape, ByteRange]) -> StoredTensor:
    dtype, shape, pieces = entry.properties.state[0], _shape(entry.size), []
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the dtype of {name} is a {type(dtype).__name__}")
    for chunk in entry.chunks:
        start, size = _shape(chunk.offsets), _shape(chunk.sizes)
        if not len(start) == len(size) == len(shape):
            raise ValueError(f"{name} has a piece {list(size)} at {list(start)}, and the shape {list(shape)}")
        place = places.get(start) or places.get(())  # a whole tensor may be filed without an offset
        if place is None:
            raise ValueError(f"{name} has a piece at {list(start)} that is in no file")
        pieces.append(Piece(start, size, place, archived=True))
    return StoredTensor(name, dtype, shape, tuple(pieces))


def _shape(value: Any) -> Shape:
    if not isinstance(value, tuple):
        raise ValueError(f"expected a shape, found a {type(value).__name__}")
    return tuple(map(_count, value))


def _count(value: Any) -> int:
    """Validates a size. Invalid values are not printed: nested tuples could give endless text."""
    if type(value) is not int or value < 0:
        what = "negative number" if type(value) is int else type(value).__name__
        raise ValueError(f"expected a size, found a {what}")
    return value
