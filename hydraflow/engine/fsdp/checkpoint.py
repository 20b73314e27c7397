"""Takes and loads checkpoints of a sharded model and its optimizer.

In: module and optimizer. Out: a `ShardedSnapshot`, or the state loaded from one. Left out on purpose: files
(`engine/sharded_checkpoint.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from hydraflow.engine.base import EXTRA, HF_MODEL, MODEL, OPTIMIZER
from hydraflow.engine.fsdp import export
from hydraflow.engine.hf_files import first_rank_copy, hf_files_of
from hydraflow.engine.optim import shard_of
from hydraflow.engine.process_group import host_group
from hydraflow.engine.sharded_checkpoint import (
    SCHEDULE_STEP,
    ShardedSnapshot,
    State,
    facts,
    open_checkpoint,
    read_into,
)
from hydraflow.models.config import ModelConfig
from hydraflow.models.heads import PolicyModel, ValueModel
from hydraflow.models.loading import persistent_buffers

Module = PolicyModel | ValueModel


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
) -> ShardedSnapshot:
    """Copies the named `contents` to host memory. Collective."""
    host_group()  # created here, in step on all ranks; `write` runs in the background
    state = {
        name: tensor.detach().to("cpu", copy=True)
        for name, tensor in _parts(module, optimizer, step, contents).items()
    }
    weights = first_rank_copy(export.stream(module, to=0)) if HF_MODEL in contents else None
    hf_files = hf_files_of(module, model, weights=weights is not None) if dist.get_rank() == 0 else None
    about = facts(
        model,
        contents,
        engine="fsdp2",
        head=head,
        tied=bool(module.hf.config.get_text_config().tie_word_embeddings),
        dtype=next(iter(module.parameters())).dtype,
        prefix=module.prefix,
    )
    return ShardedSnapshot(state, weights, hf_files, about, field)


@torch.no_grad()
def load(
    module: Module, optimizer: torch.optim.Optimizer, directory: Path, contents: Collection[str]
) -> int | None:
    """Loads the named `contents` into model and optimizer; returns the schedule's step, None when `extra` is
    not among them."""
    wanted = _parts(module, optimizer, 0, {MODEL, EXTRA}.intersection(contents))
    reader = open_checkpoint(directory, wanted)
    if OPTIMIZER in contents:
        wanted |= _empty_optimizer_state(module, optimizer, reader.index.tensors.keys())
    read_into(wanted, reader, directory)
    return int(wanted[SCHEDULE_STEP]) if SCHEDULE_STEP in wanted else None


def stored_bytes(
    module: Module, optimizer: torch.optim.Optimizer, contents: Collection[str], *, copies: int
) -> int:
    """Bytes of this rank's part of a checkpoint, AdamW's two moments counted even before the first step.

    copies: number of copies of the model; torch writes each shard once, and ranks with the same shards share
    the work.
    """
    local = sum(shard_of(tensor).nbytes for tensor in _parts(module, optimizer, 0, [MODEL]).values())
    trained = sum(
        shard_of(parameter).nbytes for group in optimizer.param_groups for parameter in group["params"]
    )
    held = local * ((MODEL in contents) + (HF_MODEL in contents)) + 2 * trained * (OPTIMIZER in contents)
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
    for name, parameter in module.named_parameters():
        slots = [slot for slot in ("step", "exp_avg", "exp_avg_sq") if f"optim.{name}.{slot}" in stored]
        if not slots or not parameter.requires_grad:
            continue
        count = torch.zeros((), dtype=torch.float32, device=parameter.device)  # fused AdamW wants it there
        optimizer.state[parameter] = {
            slot: count if slot == "step" else torch.zeros_like(parameter) for slot in slots
        }
    return dict(_slots(module, optimizer))
