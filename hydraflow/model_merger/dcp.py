"""Reads hydraflow's own checkpoints: torch's distributed checkpoint format beside a checkpoint.json.

In: a model's directory. Out: a `Checkpoint` whose tensors know the files, offsets and lengths of their pieces.
The index `.metadata` is a pickle of a protocol that torch's weights_only reader does not know; it is read by a stricter rule:
every type that it may name becomes an inert `Record`, anything else is refused.
Left out on purpose: optimizer states, which are counted but not read; writing (`split.py`).
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hydraflow.errors import ConfigError, Problem
from hydraflow.model_merger.checkpoint import Checkpoint, read_json
from hydraflow.model_merger.pieces import Extent, Piece, Shape, StoredTensor
from hydraflow.model_merger.records import record_type

INDEX = ".metadata"
FACTS = "checkpoint.json"
MODEL = "model."
"""What keys of the model's state begin with; the rest is optimizer and extra state."""

_RECORDS = {
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
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}


def is_dcp(directory: Path) -> bool:
    """Whether a directory is one model's checkpoint of this format (or should be: its index may be lost)."""
    return (directory / "dcp").is_dir() or (directory / FACTS).is_file()


def read(directory: Path) -> Checkpoint:
    """See the module. Raises ConfigError when the index cannot be read."""
    index = _read_index(directory / "dcp" / INDEX)
    try:
        return _checkpoint(directory, index)
    except ConfigError:
        raise
    except (AttributeError, TypeError, ValueError, IndexError) as error:  # a record without what an index says of every tensor
        raise ConfigError.one(str(directory / "dcp" / INDEX), None, f"is damaged: {error or type(error).__name__}") from error


def _checkpoint(directory: Path, index: Any) -> Checkpoint:
    facts = read_json(directory / FACTS)
    folder = directory / "dcp"
    places: dict[str, dict[Shape, Any]] = {}
    for key, place in index.storage_data.items():
        places.setdefault(key.fqn, {})[tuple(key.offset or ())] = place
    tensors: dict[str, StoredTensor] = {}
    others: dict[str, tuple[int, int]] = {}
    for key, entry in index.state_dict_metadata.items():
        if key.startswith(MODEL) and hasattr(entry, "chunks"):
            name = key.removeprefix(MODEL)
            tensors[name] = _tensor(name, entry, places.get(key, {}), folder)
        else:
            part = key.split(".")[0]
            entries, size = others.get(part, (0, 0))
            others[part] = (entries + 1, size + sum(place.length for place in places.get(key, {}).values()))
    if not tensors:
        raise ConfigError.one(str(folder), None, f"holds no weights: no key of its index begins with {MODEL!r}")
    ranks = _ranks(index)
    found = Checkpoint(
        directory,
        "hydraflow",
        int(facts.get("world_size", max(ranks, default=0) + 1)),
        tensors,
        head=facts.get("head"),
        prefix=facts.get("module_prefix"),
        lora_alpha=facts.get("lora_alpha") if facts.get("lora_rank") else None,
        details={name: value for name, value in facts.items() if name not in ("world_size", "head", "module_prefix")},
        others=others,
    )
    found.problems = [*_problems(found, index, folder, max(ranks, default=0))]
    return found


def _problems(found: Checkpoint, index: Any, folder: Path, last_rank: int) -> Iterator[Problem]:
    if last_rank >= found.world_size:
        rule = f"says world_size={found.world_size}, but rank {last_rank} wrote shards, too"
        yield Problem(str(found.directory / FACTS), None, rule)
    ends: dict[str, int] = {}
    for place in index.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in sorted(ends.items()):
        if not (folder / name).is_file():
            yield Problem(str(folder / name), None, f"this shard is missing; the index wants {end} bytes of it")
        elif (size := (folder / name).stat().st_size) < end:
            yield Problem(str(folder / name), None, f"is cut short: {size} of {end} bytes")
    for tensor in found.tensors.values():
        if hole := tensor.holes():
            yield Problem(str(folder / INDEX), None, hole)


def _tensor(name: str, entry: Any, places: Mapping[Shape, Any], folder: Path) -> StoredTensor:
    pieces = []
    for chunk in entry.chunks:
        start = tuple(chunk.offsets)
        place = places.get(start) or places.get(())  # a whole tensor may be filed without an offset
        if place is not None:
            extent = Extent(folder / place.relative_path, place.offset, place.length)
            pieces.append(Piece(start, tuple(chunk.sizes), extent, archived=True))
    return StoredTensor(name, entry.properties.state[0], tuple(entry.size), tuple(pieces))


def _ranks(index: Any) -> set[int]:
    """Ranks that wrote files: __RANK_NUMBER.distcp."""
    names = {place.relative_path for place in index.storage_data.values()}
    return {int(found[1]) for name in names if (found := re.fullmatch(r"__(\d+)_\d+\.distcp", name))}


def _read_index(file: Path) -> Any:
    if not file.is_file():
        raise ConfigError.one(str(file), None, "the checkpoint's index is missing")
    try:
        with file.open("rb") as opened:
            index = _IndexReader(opened).load()
    except (pickle.UnpicklingError, EOFError, ValueError, AttributeError, TypeError, LookupError, MemoryError, OverflowError) as error:
        raise ConfigError.one(str(file), None, f"is no index of a distributed checkpoint: {error}") from error
    if not hasattr(index, "state_dict_metadata") or not hasattr(index, "storage_data"):
        raise ConfigError.one(str(file), None, f"holds a {type(index).__name__}, not the index of a distributed checkpoint")
    return index


class _IndexReader(pickle.Unpickler):
    """Makes nothing but records, types of numbers and sizes."""

    def find_class(self, module: str, name: str) -> Any:
        """What stands for the named type."""
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if name in _RECORDS.get(module, ()):
            return record_type(name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index holds; nothing was executed")
