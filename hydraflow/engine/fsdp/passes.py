"""Prepares a sharded model for its forward and backward passes, and resets it afterwards."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def train_without_noise(module: nn.Module) -> None:
    """Training mode where gradient checkpointing asks for it, and evaluation mode elsewhere: routers of some
    models (PhiMoE) add noise in training mode."""
    module.eval()
    for part in module.modules():
        if hasattr(part, "gradient_checkpointing"):
            part.training = True


def forget_passes(module: nn.Module) -> None:
    """Frees gathered weights and FSDP's record of forward passes, as only a backward pass does. Kept weights
    would miss the next update; a kept record gathers weights once too often in the next backward pass."""
    assert isinstance(module, FSDPModule)
    module.reset_iter_state()
