"""Prepares a sharded model for its forward and backward passes, and resets it afterwards."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def train_without_noise(module: nn.Module) -> None:
    """Sets training mode only for modules whose gradient checkpointing needs it, evaluation mode for the
    rest: routers of some models (PhiMoE) add noise in training mode."""
    module.eval()
    for part in module.modules():
        if hasattr(part, "gradient_checkpointing"):
            part.training = True


def forget_passes(module: nn.Module) -> None:
    """Frees gathered weights and clears FSDP's record of forward passes, which otherwise only a backward pass
    does. Weights that stay gathered would miss the next update; a stale record would gather weights once too
    often in the next backward pass."""
    assert isinstance(module, FSDPModule)
    module.reset_iter_state()
