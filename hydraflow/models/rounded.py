"""Linear layers that multiply in bfloat16 while everything else stays in float32: `fsdp_config.dtype=bf32`.

In: a model in float32. Out: the same model, whose plain linear layers round both factors and the result of a
product to bfloat16, in the forward and in the backward pass. The residual stream, norms, rotations, softmax
and gradients between layers keep float32's precision, and so do adapters and the output matrix, from which
log-probabilities are computed. Not torch's own switch, `torch.backends.mkldnn.matmul.fp32_precision`: it has
no effect on CPUs without AMX, and where it has one, it reaches the small products of attention. Left out on
purpose: experts and routers that are not plain linear layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hydraflow.errors import ConfigError
from hydraflow.models.heads import PolicyModel, ValueModel
from hydraflow.models.linear import is_plain

DTYPE_KEY = "fsdp_config.dtype"
"""Within a role's section."""


class RoundedLinear(nn.Linear):
    """A linear layer with products in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N), float32."""
        rows: Tensor = _RoundedProduct.apply(x.reshape(-1, self.in_features), self.weight)
        product = rows.view(*x.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias


def require_rounded_layers(model: PolicyModel | ValueModel, *, key: str = DTYPE_KEY) -> list[nn.Module]:
    """The layers whose products are rounded: plain linear ones, without the output matrix. Raises ConfigError
    if the model has none. `key`: that of the dtype."""
    head = model.hf.get_output_embeddings()
    found = [part for part in model.hf.modules() if part is not head and is_plain(part)]
    if not found:
        rule = f"rounds products of layers of class nn.Linear itself, and {type(model.hf).__name__} has none"
        raise ConfigError.one(key, "bf32", rule, f"{key}=bf16")
    return found


def round_products(layers: Iterable[nn.Module]) -> None:
    """Makes each a `RoundedLinear`; parameters are kept."""
    for layer in layers:
        layer.__class__ = RoundedLinear


def _rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16)


class _RoundedProduct(torch.autograd.Function):
    """(M, K) and (N, K) to (M, N)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = _rounded(x)
        to_x, to_weight = ctx.needs_input_grad
        # not the rounded weight: FSDP frees and gathers `weight` between forward and backward pass
        ctx.save_for_backward(rows if to_weight else None, weight if to_x else None)
        return (rows @ _rounded(weight).t()).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        grad = _rounded(grads[0])
        to_x = (grad @ _rounded(weight)).float() if ctx.needs_input_grad[0] else None
        to_weight = (grad.t() @ rows).float() if ctx.needs_input_grad[1] else None
        return to_x, to_weight
