"""The state of a model in training in torch's distributed checkpoint format. Any engine can read it,
with any number of ranks, because tensors have Hugging Face's names and shapes.

In: each rank's parts of tensors (DTensors). Out: a `ShardedSnapshot` in host memory, which another thread may
write while training continues; and loading it. The files hold only tensors, under flat names:
`model.<parameter>`, `optim.<parameter>.<slot>` and `extra.schedule_step`. There is no random state: an engine
draws no random numbers, and a step's random numbers are keyed by its number. Left out on purpose: where the
parts come from (`fsdp/checkpoint.py`, `megatron/checkpoint.py`); directories, checksums and everything else
that makes up a run (`trainer/checkpoint_store.py`).
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from hydraflow.engine.base import CHECKPOINT_FACTS
from hydraflow.engine.dcp_index import SHARDS
from hydraflow.engine.dcp_reader import RoleCheckpointReader
from hydraflow.engine.hf_files import HuggingFaceFiles, write_hugging_face
from hydraflow.engine.process_group import host_group
from hydraflow.errors import ConfigError, EnvironmentFault
from hydraflow.models.config import ModelConfig
from hydraflow.models.loading import refused_content

HUGGING_FACE = "huggingface"
"""Folder in a role's checkpoint."""
SCHEDULE_STEP = "extra.schedule_step"

State = dict[str, torch.Tensor]


@dataclass
class ShardedSnapshot:
    """One rank's copy of the state, in host memory. An `engine.base.Snapshot`."""

    state: State
    weights: dict[str, torch.Tensor] | None
    """Full weights for a Hugging Face directory; None: not requested, or another rank has them."""
    hf_files: HuggingFaceFiles | None
    """Configuration for that directory; None: another rank writes it."""
    facts: dict[str, Any]
    field: str

    def write(self, directory: Path) -> list[Path]:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            dcp.save(self.state, checkpoint_id=directory / SHARDS, process_group=host_group())
        except dcp.CheckpointException as error:  # not a subclass of Exception
            raise EnvironmentFault(_first_failure(error)) from error
        finally:
            self.state = {}
        mine = sorted((directory / SHARDS).glob(f"__{dist.get_rank()}_*"))
        if self.hf_files is None:
            return mine
        (directory / CHECKPOINT_FACTS).write_text(json.dumps(self.facts, indent=2) + "\n")
        write_hugging_face(self.hf_files, self.weights, directory / HUGGING_FACE, field=self.field)
        others = [path for path in directory.rglob("*") if path.is_file() and not path.match(f"{SHARDS}/__*")]
        return [*mine, *sorted(others)]


def open_checkpoint(directory: Path, wanted: State) -> RoleCheckpointReader:
    """A checkpoint that holds tensors of the names and shapes of `wanted`. Raises ConfigError when it belongs
    to another model."""
    reader = RoleCheckpointReader(directory)
    stored, rule = reader.index.tensors, ""
    if missing := sorted(wanted.keys() - stored.keys()):
        rule = f"holds no {missing[0]} ({len(missing)} tensors of this model are missing)"
    elif other := [name for name in wanted if tuple(wanted[name].shape) != stored[name].shape]:
        rule = f"holds {other[0]} as {list(stored[other[0]].shape)}, not {list(wanted[other[0]].shape)}"
    if rule:
        raise ConfigError.one("trainer.resume_from_path", directory, f"{rule}: it belongs to another model")
    return reader


def read_into(wanted: State, reader: RoleCheckpointReader, directory: Path) -> None:
    """Fills the tensors `wanted`. Collective."""
    try:
        dcp.load(wanted, storage_reader=reader, process_group=host_group())
    except dcp.CheckpointException as error:
        raise EnvironmentFault(f"{directory} cannot be loaded: {_first_failure(error)}") from error


def facts(
    model: ModelConfig,
    contents: Collection[str],
    *,
    engine: str,
    head: str,
    tied: bool,
    dtype: torch.dtype,
    prefix: str,
) -> dict[str, Any]:
    """What a reader must know about the model to interpret the tensors. prefix: what precedes Hugging Face's
    names."""
    return {
        "engine": engine,
        "world_size": dist.get_world_size(),
        "head": head,
        "contents": sorted(contents),
        "lora_rank": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "tied": tied,
        "dtype": {
            torch.float32: "fp32",
            torch.bfloat16: "bf16",
            torch.float16: "fp16",
            torch.float64: "fp64",
        }[dtype],
        "module_prefix": prefix,
    }


def _first_failure(error: dcp.CheckpointException) -> str:
    """The error of the lowest rank that failed."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, pickle.UnpicklingError):
        return (
            f"rank {rank}: a shard holds more than tensors, which was not executed: {refused_content(cause)}"
        )
    return f"rank {rank}: {type(cause).__name__}: {cause}"
