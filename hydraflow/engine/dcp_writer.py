"""Writes torch's distributed checkpoint format from one process, without a process group.

In: tensors or boxes of them, each with the rank whose file it belongs in. Out: the files and their index, as
that many ranks would write them. Left out on purpose: a run's own checkpoints, which its ranks write together
(`sharded_checkpoint.py`).
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hydraflow.engine.dcp_index import INDEX
from hydraflow.engine.stored.pieces import ByteRange


class CheckpointWriter:
    """An unfinished checkpoint in an existing folder."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._entries: dict[str, STORAGE_TYPES] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}

    def write(self, content: Any, rank: int) -> ByteRange:
        """Appends the output of torch.save to a rank's file."""
        path = self._folder / f"__{rank}_0.distcp"
        with path.open("ab") as file:
            at = file.tell()
            torch.save(content, file)
            return ByteRange(path, at, file.tell() - at)

    def add_box(
        self, key: str, shape: Sequence[int], start: Sequence[int], box: torch.Tensor, place: ByteRange
    ) -> None:
        """Adds a box of the tensor `key`, whose full shape is `shape`, to the index."""
        entry = self._entries.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            properties = TensorProperties(box.dtype)
            entry = self._entries[key] = TensorStorageMetadata(properties, torch.Size(shape), [])
        entry.chunks.append(ChunkStorageMetadata(torch.Size(start), box.shape))
        self._places[MetadataIndex(key, torch.Size(start))] = _info(place)

    def add_object(self, key: str, place: ByteRange) -> None:
        """Adds a pickled object to the index."""
        self._entries[key] = BytesStorageMetadata()
        self._places[MetadataIndex(key)] = _info(place)

    def finish(self, planned: Any) -> None:
        """Writes the index. planned: planner data, by which torch restores nested states."""
        found = Metadata(self._entries, planner_data=planned, storage_data=self._places, version="1.0.0")
        with (self._folder / INDEX).open("wb") as file:
            pickle.dump(found, file)


def _info(place: ByteRange) -> _StorageInfo:
    return _StorageInfo(place.file.name, place.offset, place.length)
