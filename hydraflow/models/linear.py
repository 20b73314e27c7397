"""Linear layers in float32 on CPUs on which torch's own products are slow.

torch multiplies float32 matrices with MKL, which leaves AVX-512 unused on processors other than Intel's: 105
GFLOP/s on a core of an AMD EPYC, where oneDNN, which torch comes with, reaches 240. Its products differ in
the last bits. Gradients, and products with matrices that are too large for oneDNN, are computed by OpenBLAS
where it is faster (`openblas.py`).
In: a model as transformers builds it. Out: the same model, whose plain linear layers multiply with the
fastest of them, as those of Megatron-Core do (`engine/megatron/without_cuda.py`). Small products stay as they
are: a call of oneDNN takes longer. Left out on purpose: types other than float32, which torch gives to oneDNN
itself, attention (`products.py`), and other products that are not linear layers (experts).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hydraflow.device import onednn_is_faster, onednn_product
from hydraflow.models import openblas
from hydraflow.models.chunks import chunk_slices
from hydraflow.models.decoding_sizes import LEAST_INNER, LEAST_ROWS, MOST_WEIGHTS, is_onednns

COPIED = 2**16
"""Numbers of a gradient that are copied at a time for oneDNN."""
ADDED = 2**20
"""Numbers of a product by OpenBLAS that are computed before they are added to a sum; fewer are slower."""


class Linear(nn.Linear):
    """A linear layer that multiplies with `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N)."""
        return linear(x, self.weight, self.bias)


def is_plain(part: nn.Module) -> bool:
    """Whether a layer is a product and a bias, and nothing else."""
    return type(part) is nn.Linear or isinstance(part, Linear)


def speed_up_linears(model: nn.Module) -> None:
    """Makes every plain linear layer of the model a `Linear`, if that is faster on this machine; parameters
    are kept."""
    if onednn_is_faster():
        for part in model.modules():
            if type(part) is nn.Linear:
                part.__class__ = Linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: (..., K), (N, K) and (N,) to (..., N)."""
    if not gains(x, weight):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():  # the function alone takes as long as a product of a few rows
        return onednn_product(x, weight, bias)
    return _Product.apply(x, weight, bias)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor) -> Tensor:
    """`linear` of (M, K) into `out` (M, N), without a gradient."""
    if gains(x, weight):
        return out.copy_(onednn_product(x, weight, bias))
    if weight.numel() > MOST_WEIGHTS and len(x) >= LEAST_ROWS and openblas.suits(x):
        openblas.product(x, weight.t(), out=out)
        return out if bias is None else out.add_(bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def multiply_back(grad: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`grad @ weight`, the gradient of a linear layer's input, into `out` if it is given: (M, N) and (N, K)
    to (M, K)."""
    if openblas.suits(grad):
        return openblas.product(grad, weight, out=out)
    return onednn_product(grad, weight.t()) if out is None else multiply(grad, weight.t(), out=out)


def add_product(total: Tensor | None, grad: Tensor, x: Tensor) -> Tensor:
    """`total + grad.T @ x`, in the memory of `total` (N, K) if there is one: (M, N) and (M, K)."""
    if openblas.suits(x):
        return _add_by_openblas(total, grad, x)
    if not (_has_rows(x) and _is_float32(grad) and grad.shape[1] >= LEAST_INNER and onednn_is_faster()):
        return grad.t() @ x if total is None else total.addmm_(grad.t(), x)
    (rows, outer), inner = grad.shape, x.shape[1]
    # oneDNN copies a first factor that is transposed, and always its second
    if outer <= inner:
        found = onednn_product(grad.t(), x.t())
        return found if total is None else total.add_(found)
    found = grad.new_empty(outer, inner) if total is None else total
    turned = x.t().contiguous()
    for part in chunk_slices(outer, max(LEAST_INNER, COPIED // rows)):
        product = onednn_product(turned, grad[:, part].contiguous().t()).t()
        if total is None:
            found[part] = product
        else:
            found[part] += product
    return found


def _add_by_openblas(total: Tensor | None, grad: Tensor, x: Tensor) -> Tensor:
    if total is None:
        return openblas.product(grad.t(), x)
    for part in chunk_slices(len(total), max(LEAST_INNER, ADDED // max(1, x.shape[1]))):
        total[part] += openblas.product(grad[:, part].t(), x)
    return total


def gains(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN multiplies these, (..., K) and (N, K)."""
    return suits_onednn(weight) and _has_rows(x)


def suits_onednn(weight: Tensor) -> bool:
    """Whether oneDNN multiplies LEAST_ROWS rows or more with this matrix (N, K)."""
    is_whole = weight.is_contiguous() or weight.t().is_contiguous()
    return is_whole and is_onednns(*weight.shape) and _is_float32(weight) and onednn_is_faster()


def _has_rows(x: Tensor) -> bool:
    return _is_float32(x) and x.numel() >= LEAST_ROWS * x.shape[-1]


def _is_float32(x: Tensor) -> bool:
    """On a CPU."""
    return x.dtype == torch.float32 and x.device.type == "cpu"


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        to_x, to_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if to_weight else None, weight if to_x else None)
        ctx.shape = x.shape
        return onednn_product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        to_x = to_weight = to_bias = None
        grad = grads[0].flatten(0, -2).contiguous()  # (M, N)
        if ctx.needs_input_grad[0]:
            to_x = multiply_back(grad, weight).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            to_weight = add_product(None, grad, x.flatten(0, -2))
        if ctx.needs_input_grad[2]:
            to_bias = grad.sum(0)
        return to_x, to_weight, to_bias
