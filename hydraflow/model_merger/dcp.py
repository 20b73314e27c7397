"""Reads hydraflow's own checkpoints: torch's distributed checkpoint format beside a checkpoint.json.

In: a model's directory. Out: a `Checkpoint` whose tensors know the files, offsets and lengths of their
pieces. Left out on purpose: reading the index (`engine/dcp_index.py`); optimizer states, which are counted
but not read; writing (`split.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hydraflow.engine.dcp_index import INDEX, SHARDS, Index, read_index
from hydraflow.engine.stored.checkpoint import Checkpoint, read_json
from hydraflow.engine.stored.pieces import StoredTensor
from hydraflow.engine.stored.shards import count, last_writer, missing_parts, stored
from hydraflow.errors import ConfigError, Problem

FACTS = "checkpoint.json"
MODEL = "model."
"""Prefix of the model's state keys; the rest is optimizer and extra state."""


def is_dcp(directory: Path) -> bool:
    """Whether a directory is one model's checkpoint of this format (its index may be missing)."""
    return (directory / SHARDS).is_dir() or (directory / FACTS).is_file()


def read(directory: Path) -> Checkpoint:
    """See the module. Raises ConfigError when the index cannot be read."""
    index, folder = read_index(directory), directory / SHARDS
    try:
        return _checkpoint(directory, index)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:  # pieces whose dimensions differ from their tensor's
        raise ConfigError.one(str(folder / INDEX), None, f"is damaged: {error}") from error


def _checkpoint(directory: Path, index: Index) -> Checkpoint:
    facts = read_json(directory / FACTS)
    folder = directory / SHARDS
    tensors: dict[str, StoredTensor] = {}
    others: dict[str, tuple[int, int]] = {}
    for key, tensor in index.tensors.items():
        if key.startswith(MODEL):
            name = key.removeprefix(MODEL)
            tensors[name] = stored(name, tensor, folder)
        else:
            count(others, key.split(".")[0], sum(chunk.place.length for chunk in tensor.chunks))
    for key, size in index.objects.items():
        count(others, key.split(".")[0], size)
    if not tensors:
        rule = f"holds no weights: no key of its index begins with {MODEL!r}"
        raise ConfigError.one(str(folder), None, rule)
    last_rank = last_writer(index)
    shown_apart = ("world_size", "head", "module_prefix")
    found = Checkpoint(
        directory,
        "hydraflow",
        int(facts.get("world_size", last_rank + 1)),
        tensors,
        head=facts.get("head"),
        prefix=facts.get("module_prefix"),
        lora_alpha=facts.get("lora_alpha") if facts.get("lora_rank") else None,
        details={name: fact for name, fact in facts.items() if name not in shown_apart},
        others=others,
    )
    found.problems = [*_problems(found, index, folder, last_rank)]
    return found


def _problems(found: Checkpoint, index: Index, folder: Path, last_rank: int) -> Iterator[Problem]:
    if last_rank >= found.world_size:
        rule = f"says world_size={found.world_size}, but rank {last_rank} wrote shards, too"
        yield Problem(str(found.directory / FACTS), None, rule)
    yield from missing_parts(found.tensors.values(), index, folder)
