"""Gated feed-forward layers whose activation is one fused kernel.

In: a model as transformers builds it. Out: the same model; layers whose operations are exactly transformers'
usual ones (about a hundred classes) compute `silu(gate) * up` in one call, by torch.compile's kernel or a GPU
kernel. Left out on purpose: other activations, experts, and a kernel of our own for CPUs, where the plain
operations are as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from hydraflow.models import compiled
from hydraflow.models.gpu_kernels import kernels_for
from hydraflow.models.norms import steps_of

SILU = (nn.SiLU, SiLUActivation)
"""The classes of this activation in transformers' models."""


def replace_gates(model: nn.Module, *, compile: bool = False) -> None:
    """Makes every usual SwiGLU layer call `swiglu`, or with `compile` `compiled.swiglu`. Layers whose
    `forward` has been replaced are left alone."""
    function = compiled.swiglu if compile else swiglu
    for part in model.modules():
        usual = steps_of(type(part).forward) == steps_of(_as_in_transformers)
        if usual and "forward" not in vars(part) and isinstance(part.act_fn, SILU):
            part.forward = partial(_forward, part, function)  # type: ignore[method-assign]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, (..., I) each."""
    kernels = kernels_for(gate)
    return F.silu(gate) * up if kernels is None else kernels.swiglu(gate, up)


def _forward(self: Any, function: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    return self.down_proj(function(self.gate_proj(x), self.up_proj(x)))


def _as_in_transformers(self: Any, x: Tensor) -> Tensor:
    """A verbatim copy of LlamaMLP.forward, whose bytecode is compared with that of others."""
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj
