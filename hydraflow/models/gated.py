"""Gated feed-forward layers whose activation is one fused kernel.

In: a model as transformers builds it. Out: the same model; layers of transformers' usual form, operation by
operation (of about a hundred classes), compute `silu(gate) * up` in one call. Left out on purpose: other
activations, experts, and a kernel of our own: without a compiler the plain operations are as fast.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers.activations import SiLUActivation

from hydraflow.models import compiled
from hydraflow.models.norms import steps_of

_SILU = (nn.SiLU, SiLUActivation)


def replace_gates(model: nn.Module) -> None:
    """Has every usual layer with SwiGLU call `compiled.swiglu`; layers whose `forward` has been replaced stay
    as they are."""
    for part in model.modules():
        usual = steps_of(type(part).forward) == steps_of(_as_in_transformers)
        if usual and "forward" not in vars(part) and isinstance(part.act_fn, _SILU):
            part.forward = MethodType(_forward, part)  # type: ignore[method-assign]


def _forward(self: Any, x: Tensor) -> Tensor:
    found: Tensor = self.down_proj(compiled.swiglu(self.gate_proj(x), self.up_proj(x)))
    return found


def _as_in_transformers(self: Any, x: Tensor) -> Tensor:
    """A verbatim copy of LlamaMLP.forward, whose bytecode is compared with that of others."""
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj  # type: ignore[no-any-return]
