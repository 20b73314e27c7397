"""Linear layers that multiply in bfloat16 while everything else stays in float32: `fsdp_config.dtype=bf32`.

In: a model in float32. Out: the same model, whose plain linear layers round both factors and the result of a
product to bfloat16, in the forward and in the backward pass. The residual stream, norms, rotations, softmax
and gradients between layers keep float32's precision, and so does the output matrix, from which
log-probabilities are computed. Left out on purpose: experts and routers that are not plain linear layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hydraflow.models.linear import is_plain


class RoundedLinear(nn.Linear):
    """A linear layer with products in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N), float32."""
        product: Tensor = _RoundedProduct.apply(x, self.weight)
        return product if self.bias is None else product + self.bias


def round_products(model: nn.Module, *, besides: nn.Module | None) -> int:
    """Makes every plain linear layer of the model except `besides` a `RoundedLinear`; parameters are kept.
    Returns the number of such layers."""
    found = [part for part in model.modules() if part is not besides and is_plain(part)]
    for part in found:
        part.__class__ = RoundedLinear
    return len(found)


def _rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16)


class _RoundedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = _rounded(x.flatten(0, -2))  # (M, K)
        to_x, to_weight = ctx.needs_input_grad
        # not the rounded weight: FSDP frees and gathers `weight` between forward and backward pass
        ctx.save_for_backward(rows if to_weight else None, weight if to_x else None)
        ctx.shape = x.shape
        return (rows @ _rounded(weight).t()).float().view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        grad = _rounded(grads[0].flatten(0, -2))  # (M, N)
        to_x = (grad @ _rounded(weight)).float().view(ctx.shape) if ctx.needs_input_grad[0] else None
        to_weight = (grad.t() @ rows).float() if ctx.needs_input_grad[1] else None
        return to_x, to_weight
