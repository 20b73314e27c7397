"""AdamW and the learning rate at each training step.

In: parameters and an `OptimConfig`. Out: torch's optimizer, and a pure function of the step.
Left out on purpose: clipping (it needs the ranks: `fsdp/engine.py`), and any state of the schedule but the step's number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from hydraflow.engine.config import OptimConfig
from hydraflow.errors import ConfigError

SCHEDULES = ("constant", "linear", "cosine")


def make_optimizer(parameters: Iterable[torch.nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over those parameters that are trained, in one fused kernel per step."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    first, second = config.betas
    return torch.optim.AdamW(trained, lr=config.lr, betas=(first, second), eps=config.eps, weight_decay=config.weight_decay, fused=True)


def warmup_steps(config: OptimConfig, total_steps: int) -> int:
    """Training steps of warm-up."""
    return config.lr_warmup_steps if config.lr_warmup_steps >= 0 else int(config.lr_warmup_steps_ratio * total_steps)


def lr_at(config: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of training step `step` = 0, 1, ...: from 0 up to `lr`, then as lr_scheduler_type says.

    Linear and cosine reach lr * min_lr_ratio when `total_steps` are done and stay there.

    >>> config = OptimConfig(lr=8.0, lr_scheduler_type="linear", lr_warmup_steps=2, min_lr_ratio=0.5)
    >>> [lr_at(config, step, 6) for step in range(8)]
    [0.0, 4.0, 8.0, 7.0, 6.0, 5.0, 4.0, 4.0]
    """
    warmup = warmup_steps(config, total_steps)
    if step < warmup:
        return config.lr * step / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    left = 1.0 - done if config.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)


def check(config: OptimConfig, field: str) -> None:
    """Raises ConfigError for a schedule that does not exist or betas that are not two numbers in [0, 1)."""
    if config.lr_scheduler_type not in SCHEDULES:
        rule = f"must be one of {', '.join(SCHEDULES)}"
        raise ConfigError.one(f"{field}.lr_scheduler_type", config.lr_scheduler_type, rule, f"{field}.lr_scheduler_type=constant")
    if len(config.betas) != 2 or not all(0 <= beta < 1 for beta in config.betas):
        raise ConfigError.one(f"{field}.betas", config.betas, "must be two numbers in [0, 1)", f"{field}.betas=[0.9,0.999]")
