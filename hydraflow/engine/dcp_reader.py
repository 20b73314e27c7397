"""torch's reader of distributed checkpoints, without its unpickling.

torch unpickles the index, and then whatever the index calls a pickled object, so a checkpoint from elsewhere
could run code. Here `engine/dcp_index.py` reads the index, and torch gets one built from the validated
values, with only tensors in it. torch reads their pieces with weights_only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hydraflow.engine.dcp_index import SHARDS, Index, read_tensors_alone


class RoleCheckpointReader(dcp.FileSystemReader):
    """Reads the checkpoint of a role. Raises ConfigError as `read_tensors_alone` does."""

    def __init__(self, checkpoint: Path):
        super().__init__(checkpoint / SHARDS)
        self.index = read_tensors_alone(checkpoint)
        self._metadata = _metadata(self.index)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The metadata given to torch, also in place of a rank's own index."""
        return self._metadata


def _metadata(index: Index) -> Metadata:
    entries: dict[str, STORAGE_TYPES] = {}
    places = {}
    for name, tensor in index.tensors.items():
        chunks = []
        for piece in tensor.pieces:
            start, place = torch.Size(piece.start), piece.byte_range
            chunks.append(ChunkStorageMetadata(start, torch.Size(piece.shape)))
            places[MetadataIndex(name, start)] = _StorageInfo(place.file.name, place.offset, place.length)
        entries[name] = TensorStorageMetadata(
            TensorProperties(tensor.dtype), torch.Size(tensor.shape), chunks
        )
    return Metadata(entries, storage_data=places)
