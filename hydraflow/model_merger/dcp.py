"""Reads hydraflow's own checkpoints: torch's distributed checkpoint format beside a checkpoint.json.

In: a model's directory. Out: a `Checkpoint` whose tensors know the files, offsets and lengths of their
pieces. Left out on purpose: reading the index (`engine/dcp_index.py`); optimizer states, which are counted
but not read; writing (`split.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hydraflow.engine.dcp_index import SHARDS, read_index
from hydraflow.engine.stored.checkpoint import Checkpoint, counted, read_json
from hydraflow.engine.stored.pieces import StoredTensor
from hydraflow.errors import ConfigError, Problem

FACTS = "checkpoint.json"
MODEL = "model."
"""Prefix of the model's state keys; the rest is optimizer and extra state."""


def is_dcp(directory: Path) -> bool:
    """Whether a directory is one model's checkpoint in this format (its index may be missing)."""
    return (directory / SHARDS).is_dir() or (directory / FACTS).is_file()


def read(directory: Path) -> Checkpoint:
    """The checkpoint in `directory`. Raises ConfigError when its index cannot be read."""
    index, facts = read_index(directory), read_json(directory / FACTS)
    tensors: dict[str, StoredTensor] = {}
    entries = []
    for key, tensor in index.tensors.items():
        if key.startswith(MODEL):
            name = key.removeprefix(MODEL)
            tensors[name] = replace(tensor, name=name)
        else:
            entries.append((key.split(".")[0], tensor.stored_bytes))
    entries += [(key.split(".")[0], size) for key, size in index.objects.items()]
    if not tensors:
        rule = f"holds no weights: no key of its index begins with {MODEL!r}"
        raise ConfigError.one(str(index.folder), None, rule)
    world_size = facts.get("world_size", index.last_writer + 1)
    if type(world_size) is not int:
        raise ConfigError.one(f"{directory / FACTS}: world_size", world_size, "must be a whole number")
    shown_apart = ("world_size", "head", "module_prefix")
    found = Checkpoint(
        directory,
        "hydraflow",
        world_size,
        tensors,
        head=facts.get("head"),
        prefix=facts.get("module_prefix"),
        lora_alpha=facts.get("lora_alpha") if facts.get("lora_rank") else None,
        details={name: fact for name, fact in facts.items() if name not in shown_apart},
        others=counted(entries),
    )
    if index.last_writer >= world_size:
        rule = f"says world_size={world_size}, but rank {index.last_writer} wrote shards, too"
        found.problems.append(Problem(str(directory / FACTS), None, rule))
    found.problems += index.missing_parts(tensors.values())
    return found
