"""Sharded state of a model in training: weights, optimizer and schedule, in torch's distributed checkpoint format.

In: a sharded model and its optimizer. Out: a directory that another number of ranks can read.
Left out on purpose: random states, the place in the data, and everything else that makes up a run.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from hydraflow.engine.fsdp.export import replace_directory


def save(module: nn.Module, optimizer: torch.optim.Optimizer, step: int, directory: Path) -> None:
    """Every rank writes its shards; rank 0 gives the directory its name when all are done."""
    unfinished = directory.with_name(directory.name + ".unfinished")
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier()
    dcp.save(_state(module, optimizer, step), checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        replace_directory(unfinished, directory)
    dist.barrier()


def load(module: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> int:
    """Fills model and optimizer, and returns the schedule's step."""
    state = _state(module, optimizer, 0)
    dcp.load(state, checkpoint_id=directory)
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return int(state["step"])


def _state(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    weights, moments = get_state_dict(module, optimizer)
    return {"model": weights, "optim": moments, "step": torch.tensor(step)}
