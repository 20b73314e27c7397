"""Checkpoints from another source: what they would run, and how it gets into one."""

from __future__ import annotations

import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from hydraflow.workers.saving import file_facts

INDEX = "dcp/.metadata"
WEIGHT = "model.lm.model.norm.weight"
OBJECT = f"calls {WEIGHT} a pickled object, but a run saves tensors only; nothing was executed"
REFUSED = "it names posix.mkdir, which no index holds; nothing was executed"


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def put_into_index(role: Path, folder: Path) -> None:
    """The index makes `folder`, and is otherwise what it was."""
    index: Metadata = pickle.loads((role / INDEX).read_bytes())
    index.planner_data = Payload(folder)
    (role / INDEX).write_bytes(pickle.dumps(index))


def put_into_shard(role: Path, folder: Path, *, as_object: bool) -> None:
    """Where a weight was, its shard makes `folder`; `as_object`: the index says that an object is to be
    unpickled there."""
    index: Metadata = pickle.loads((role / INDEX).read_bytes())
    places = [key for key in index.storage_data if key.fqn == WEIGHT]
    for key in places:
        place = index.storage_data[key]
        shard = role / "dcp" / place.relative_path
        hostile = io.BytesIO()
        torch.save(Payload(folder), hostile)
        place.offset, place.length = shard.stat().st_size, len(hostile.getvalue())
        shard.write_bytes(shard.read_bytes() + hostile.getvalue())
    if as_object:
        index.state_dict_metadata[WEIGHT] = BytesStorageMetadata()
        index.storage_data[MetadataIndex(WEIGHT)] = index.storage_data.pop(places[0])
    (role / INDEX).write_bytes(pickle.dumps(index))


def seal(step: Path) -> None:
    """Makes the manifest of a checkpoint true again, as anyone who changes one can."""
    manifest = json.loads((step / "manifest.json").read_text())
    for name, facts in manifest["files"].items():
        found = file_facts(step / name)
        facts.update(bytes=found.bytes, crc32=found.crc32)
    (step / "manifest.json").write_text(json.dumps(manifest))
