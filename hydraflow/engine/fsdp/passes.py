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


def forget_gradients(module: nn.Module) -> None:
    """Clears the gradient, including that of passes without a reduction, which FSDP keeps apart from the
    sharded parameters that `zero_grad` sees."""
    module.zero_grad(set_to_none=True)
    for unit in module.modules():
        if not isinstance(unit, FSDPModule):
            continue
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):  # there is none before the first pass
                    parameter._unsharded_param.grad = None
