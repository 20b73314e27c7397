"""Gated feed-forward layers whose activation is one function.

In: a model as transformers builds it. Out: the same model; layers whose operations are exactly transformers'
usual ones (about a hundred classes) compute `silu(gate) * up` in one call: by torch.compile's kernel, by a
GPU kernel, or on a CPU a part at a time, which goes through all operations while it is in the cache. That
keeps no activation for the backward pass, which computes it again, and changes no bit. Left out on purpose:
other activations, and experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import SiLUActivation

from hydraflow.models import compiled
from hydraflow.models.chunks import chunk_slices
from hydraflow.models.gpu_kernels import kernels_for
from hydraflow.models.norms import steps_of

_SILU = (nn.SiLU, SiLUActivation)
CACHED = 2**16
"""Numbers of a gate that are computed at a time on a CPU. Like the whole, a part begins with full vectors, so
its last bits are the same."""


def replace_gates(model: nn.Module, *, compile: bool = False) -> None:
    """Makes every usual SwiGLU layer call `swiglu`, or with `compile` `compiled.swiglu`. Layers whose
    `forward` has been replaced are left alone."""
    function = compiled.swiglu if compile else swiglu
    for part in model.modules():
        usual = steps_of(type(part).forward) == steps_of(_as_in_transformers)
        if usual and "forward" not in vars(part) and isinstance(part.act_fn, _SILU):
            part.forward = partial(_forward, part, function)  # type: ignore[method-assign]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, (..., I) each."""
    kernels = kernels_for(gate)
    if kernels is None and gate.device.type != "cpu":
        return F.silu(gate) * up
    found: Tensor = (_Gated.apply if kernels is None else kernels.swiglu)(gate, up)
    return found


class _Gated(torch.autograd.Function):
    """On a CPU."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        found = torch.empty_like(gate)
        for g, u, out in _parts(gate, up, found):
            torch.mul(F.silu(g), u, out=out)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        to_gate, to_up = torch.empty_like(gate), torch.empty_like(up)
        for grad, g, u, of_g, of_u in _parts(grads[0], gate, up, to_gate, to_up):
            torch.mul(grad, F.silu(g), out=of_u)
            torch.ops.aten.silu_backward.grad_input(grad * u, g, grad_input=of_g)
        return to_gate, to_up


def _parts(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """The same part of each."""
    flat = [one.contiguous().view(-1) for one in tensors]
    for part in chunk_slices(len(flat[0]), CACHED):
        yield [one[part] for one in flat]


def _forward(self: Any, function: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    found: Tensor = self.down_proj(function(self.gate_proj(x), self.up_proj(x)))
    return found


def _as_in_transformers(self: Any, x: Tensor) -> Tensor:
    """A verbatim copy of LlamaMLP.forward, whose bytecode is compared with that of others."""
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj  # type: ignore[no-any-return]
