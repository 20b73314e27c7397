"""RMSNorm with a custom backward pass, replacing transformers'.

In: a model as transformers builds it. Out: the same model; its norms give bit-identical results, save less
for the backward pass, and take half the time there. On a GPU they are one kernel, and the last bits differ.
Modules are replaced if the operations of their `forward` are exactly transformers' usual ones, as in about
sixty classes. Left out on purpose: norms with other operations (Gemma's, OLMo's), and float64, where
transformers' own backward pass is the reference for tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hydraflow.models import compiled
from hydraflow.models.gpu_kernels import kernels_for


class RMSNorm(nn.Module):
    """`weight * (x / rms(x))`, normalised in float32 for any dtype (Zhang and Sennrich 2019,
    https://arxiv.org/abs/1910.07467)."""

    def __init__(self, weight: nn.Parameter, epsilon: float, *, compile: bool = False):
        super().__init__()
        self.weight = weight
        self.variance_epsilon = epsilon
        self._function = compiled.rms_norm if compile else rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """(..., H) to (..., H)."""
        if x.dtype == torch.float64:
            return _as_in_transformers(self, x)
        return self._function(x, self.weight, self.variance_epsilon)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """(..., H) to (..., H), normalised over the last dimension."""
    kernels = kernels_for(x) if x.dtype == weight.dtype else None
    return (_Normed.apply if kernels is None else kernels.rms_norm)(x, weight, epsilon)


def replace_norms(model: nn.Module, *, compile: bool = False) -> None:
    """Replaces every equivalent norm of the model with `RMSNorm`; parameters are kept. `compile`: use the
    kernel that torch.compile fuses."""
    for part in list(model.modules()):
        for name, child in part.named_children():
            if steps_of(type(child).forward) == steps_of(_as_in_transformers):
                usual: Any = child
                part.add_module(name, RMSNorm(usual.weight, usual.variance_epsilon, compile=compile))


class _Normed(torch.autograd.Function):
    """Saves the normalised input n and 1 / rms(x) instead of x: with g = gradient * weight, the gradient of x
    is (g - n * mean(g * n)) / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        normed = (wide * scale).to(x.dtype)
        ctx.save_for_backward(normed, scale, weight)
        return weight * normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        normed, scale, weight = ctx.saved_tensors
        (grad,) = grads
        to_x = to_weight = None
        products = (grad * normed).flatten(0, -2)
        if ctx.needs_input_grad[1]:
            to_weight = products.sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            wide, along = (grad * weight).to(torch.float32), normed.to(torch.float32)
            if products.dtype == weight.dtype == torch.float32:
                mean = torch.mv(products, weight)  # the formula above with one memory pass less
            else:
                mean = torch.linalg.vecdot(wide, along)
            mean = mean.div_(weight.numel()).view(scale.shape)
            to_x = wide.addcmul_(along, mean, value=-1).mul_(scale).to(normed.dtype)
        return to_x, to_weight, None


def _as_in_transformers(self: Any, hidden_states: Tensor) -> Tensor:
    """A verbatim copy of LlamaRMSNorm.forward, whose bytecode is compared with that of other norms."""
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)


def steps_of(function: Any) -> tuple[Any, ...] | None:
    """A function's bytecode and names; None: not a plain function."""
    code = getattr(function, "__code__", None)
    # without the first constant, which may be a docstring
    return None if code is None else (code.co_code, code.co_names, code.co_consts[1:])
