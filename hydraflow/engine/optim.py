"""AdamW and the learning rate at each training step.

In: parameters and an `OptimConfig`. Out: torch's optimizer, and a pure function of the step. Left out on
purpose: clipping, which needs all ranks (`fsdp/engine.py`); schedule state other than the step number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hydraflow.batch_plan.parts import warmup_steps
from hydraflow.engine.config import OptimConfig

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}
"""Remaining fraction of the decay from `lr` to `lr * min_lr_ratio`, by the share of post-warm-up steps
done."""


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; of another tensor all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ShardAdamW(torch.optim.AdamW):
    """AdamW that updates each rank's shards directly: the update is elementwise, and a parameter, its
    gradient and its moments are divided alike. Through DTensor the first step would work out the placement of
    every result: 0.2 s for the recipe's model."""

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        """As torch's, with this rank's shard in place of each DTensor."""
        has_complex: bool = super()._init_group(group, *lists)
        for one in lists:
            one[:] = map(shard_of, one)
        return has_complex


def make_optimizer(parameters: Iterable[torch.nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trained parameters, in one fused kernel per step."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    first, second = config.betas
    return ShardAdamW(
        trained,
        lr=config.lr,
        betas=(first, second),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def lr_at(config: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of training step `step` = 0, 1, ...: linear warm-up from 0 to `lr`, then
    `lr_scheduler_type`.

    Linear and cosine reach lr * min_lr_ratio when `total_steps` are done and stay there.

    >>> config = OptimConfig(lr=8.0, lr_scheduler_type="linear", lr_warmup_steps=2, min_lr_ratio=0.5)
    >>> [lr_at(config, step, 6) for step in range(8)]
    [0.0, 4.0, 8.0, 7.0, 6.0, 5.0, 4.0, 4.0]
    """
    warmup = warmup_steps(config, total_steps)
    if step < warmup:
        return config.lr * step / warmup
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    left = SCHEDULES[config.lr_scheduler_type](done)
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)
