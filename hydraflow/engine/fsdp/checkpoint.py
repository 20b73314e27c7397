"""Sharded state of a model in training, in torch's distributed checkpoint format: any number of ranks can
read it back.

In: a sharded model and its optimizer. Out: an `FSDPSnapshot` in host memory, which another thread may write
while training continues; and loading it. The file holds only tensors, under flat names: `model.<parameter>`,
`optim.<parameter>.<slot>` and `extra.schedule_step`. No random state is in it: an engine draws no
random numbers, and a step's are keyed by its number. Left out on purpose: directories, checksums and
everything else that makes up a run (`trainer/checkpoint_store.py`)."""

from __future__ import annotations

import json
import pickle
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from hydraflow.engine.base import CHECKPOINT_FACTS, EXTRA, HF_MODEL, MODEL, OPTIMIZER
from hydraflow.engine.dcp_index import SHARDS
from hydraflow.engine.fsdp import export
from hydraflow.engine.fsdp.reader import RoleCheckpointReader
from hydraflow.engine.process_group import host_group
from hydraflow.errors import ConfigError, EnvironmentFault
from hydraflow.models.config import ModelConfig
from hydraflow.models.heads import PolicyModel, ValueModel
from hydraflow.models.loading import persistent_buffers, refused_content

HUGGING_FACE = "huggingface"
"""Folder of a role's checkpoint."""
SCHEDULE_STEP = "extra.schedule_step"

Module = PolicyModel | ValueModel
State = dict[str, torch.Tensor]


@dataclass
class FSDPSnapshot:
    """One rank's copy of the state, in host memory. A `engine.base.Snapshot`."""

    state: State
    weights: State | None
    """Full weights for a Hugging Face directory; None: not requested, or another rank has them."""
    hf_files: export.HuggingFaceFiles | None
    """Configuration for that directory; None: another rank writes it."""
    facts: dict[str, Any]
    field: str

    def write(self, directory: Path) -> list[Path]:
        """See `engine.base.Snapshot`."""
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
        export.write_hugging_face(self.hf_files, self.weights, directory / HUGGING_FACE, field=self.field)
        others = [path for path in directory.rglob("*") if path.is_file() and not path.match(f"{SHARDS}/__*")]
        return [*mine, *sorted(others)]


@torch.no_grad()
def snapshot(
    module: Module,
    model: ModelConfig,
    optimizer: torch.optim.Optimizer,
    step: int,
    contents: Collection[str],
    *,
    head: str,
    field: str,
) -> FSDPSnapshot:
    """Copies what `contents` names into host memory. Every rank takes part."""
    host_group()  # created here, in step on all ranks; `write` runs in the background
    state = {
        name: tensor.detach().to("cpu", copy=True)
        for name, tensor in _parts(module, optimizer, step, contents).items()
    }
    weights = export.full_weights(module) if HF_MODEL in contents else None
    hf_files = (
        export.hf_files_of(module, model, weights=weights is not None) if dist.get_rank() == 0 else None
    )
    return FSDPSnapshot(state, weights, hf_files, _facts(module, model, contents, head), field)


@torch.no_grad()
def load(
    module: Module, optimizer: torch.optim.Optimizer, directory: Path, contents: Collection[str]
) -> int | None:
    """Loads the named `contents` into model and optimizer; returns the schedule's step, None when `extra` is
    not among them."""
    reader = RoleCheckpointReader(directory)
    stored = reader.index.tensors.keys()
    wanted = _parts(module, optimizer, 0, [MODEL, EXTRA])
    wanted = {name: tensor for name, tensor in wanted.items() if name.partition(".")[0] in contents}
    if missing := sorted(wanted.keys() - stored):
        rule = (
            f"holds no {missing[0]} ({len(missing)} tensors of this model are missing): it is of another"
            " model"
        )
        raise ConfigError.one("trainer.resume_from_path", directory, rule)
    if OPTIMIZER in contents:
        wanted |= _empty_optimizer_state(module, optimizer, stored)
    try:
        dcp.load(wanted, storage_reader=reader, process_group=host_group())
    except dcp.CheckpointException as error:
        raise EnvironmentFault(f"{directory} cannot be loaded: {_first_failure(error)}") from error
    return int(wanted[SCHEDULE_STEP]) if SCHEDULE_STEP in wanted else None


def stored_bytes(
    module: Module, optimizer: torch.optim.Optimizer, contents: Collection[str], *, copies: int
) -> int:
    """Bytes of this rank's part of a checkpoint, AdamW's two moments counted even before the first step.

    copies: of the model; torch writes each shard once, and divides the shards among the ranks that have them.
    """
    local = sum(_local_bytes(tensor) for tensor in _parts(module, optimizer, 0, [MODEL]).values())
    trained = sum(
        _local_bytes(parameter) for group in optimizer.param_groups for parameter in group["params"]
    )
    held = (
        local * (MODEL in contents) + local * (HF_MODEL in contents) + 2 * trained * (OPTIMIZER in contents)
    )
    return -(-held // copies)


def _parts(module: Module, optimizer: torch.optim.Optimizer, step: int, contents: Collection[str]) -> State:
    parts: State = {}
    if MODEL in contents:
        parts |= {f"model.{name}": parameter.detach() for name, parameter in module.named_parameters()}
        parts |= {f"model.{name}": buffer for name, buffer in persistent_buffers(module)}
    if OPTIMIZER in contents:
        parts |= dict(_slots(module, optimizer))
    if EXTRA in contents:
        parts[SCHEDULE_STEP] = torch.tensor(step)
    return parts


def _slots(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """The optimizer's tensors. A parameter that was never updated has none."""
    for name, parameter in module.named_parameters():
        for slot, value in optimizer.state.get(parameter, {}).items():
            yield f"optim.{name}.{slot}", value


def _empty_optimizer_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, stored: Collection[str]
) -> State:
    """Creates empty optimizer slots for those in the checkpoint, and returns them by name."""
    optimizer.state.clear()
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in module.named_parameters():
        slots = [slot for slot in ("step", "exp_avg", "exp_avg_sq") if f"optim.{name}.{slot}" in stored]
        if not slots or id(parameter) not in trained:
            continue
        count = torch.zeros((), dtype=torch.float32, device=parameter.device)  # where fused AdamW requires it
        optimizer.state[parameter] = {
            slot: count if slot == "step" else torch.zeros_like(parameter) for slot in slots
        }
    return dict(_slots(module, optimizer))


def _first_failure(error: dcp.CheckpointException) -> str:
    """The error of the lowest rank that failed."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, pickle.UnpicklingError):
        return (
            f"rank {rank}: a shard holds more than tensors, which was not executed: {refused_content(cause)}"
        )
    return f"rank {rank}: {type(cause).__name__}: {cause}"


def _local_bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def _facts(module: Module, model: ModelConfig, contents: Collection[str], head: str) -> dict[str, Any]:
    """What a reader must know about the model to interpret the tensors."""
    kept = next(iter(module.parameters())).dtype
    return {
        "engine": "fsdp2",
        "world_size": dist.get_world_size(),
        "head": head,
        "contents": sorted(contents),
        "lora_rank": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "tied": bool(module.hf.config.get_text_config().tie_word_embeddings),
        "dtype": {
            torch.float32: "fp32",
            torch.bfloat16: "bf16",
            torch.float16: "fp16",
            torch.float64: "fp64",
        }[kept],
        "module_prefix": module.prefix,
    }
