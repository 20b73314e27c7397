"""Copies of weights in the order in which libraries multiply, for layers that run once for every token.

oneDNN reorders a matrix before it multiplies with it, which takes as long as the product of 16 rows: the
matrices of 31.7 million parameters take 20 ms in float32 and 12 in bfloat16, reordered ones 12.5 and 7 (one
core of an AMD EPYC). MKL, which multiplies float32 on Intel's processors, takes a quarter longer for 64 rows
than with a transposed copy, and 1.7 times as long for 16. The bits are the same. The copies exist while a
wave is decoded, as its caches do.
In: a model for generation. Out: the same model, whose plain linear layers can be told to keep a copy. Left
out on purpose: other products, for which no copy is faster or has the same bits, and experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from hydraflow.device import cpu_has_bf16, mkl_has_avx512, onednn_product, onednn_reordered
from hydraflow.models.decoding_sizes import LEAST_ROWS, keeps_bits_transposed
from hydraflow.models.linear import Linear, is_plain, linear, suits_onednn


@runtime_checkable
class KeepsCopy(Protocol):
    """What can keep a copy of its weight while the weight does not change."""

    def keep_copy(self) -> None:
        """From its next use on it has a copy, where that is of use."""

    def drop_copy(self) -> None:
        """To be called before the weight changes."""


class ReorderingLinear(Linear):
    """A linear layer that keeps a reordered copy of its weight between `keep_copy` and `drop_copy`."""

    _way: _Way | None = None
    _copy: Tensor | None = None

    def keep_copy(self) -> None:
        """From its next use on it has a copy, if products with one are faster and have the same bits."""
        self._way = _way_of(self.weight)

    def drop_copy(self) -> None:
        """Drops the copy. To be called before the weight changes."""
        self._way = self._copy = None

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N), without a gradient if there is a copy. Experts that are layers of their own
        may get few rows, for which a copy is not used."""
        if self._way is None or x.numel() < LEAST_ROWS * x.shape[-1]:
            return linear(x, self.weight, self.bias)
        if self._copy is None:
            self._copy = self._way.copy(self.weight)
        return self._way.multiply(x, self._copy, self.bias)


@dataclass(frozen=True)
class _Way:
    """How to multiply with a copy of a weight."""

    copy: Callable[[Tensor], Tensor]
    """(N, K) to the copy."""
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """(..., K), the copy, and a bias (N,), to (..., N)."""


def let_linears_reorder(model: nn.Module) -> None:
    """Makes every plain linear layer of the model a `ReorderingLinear`; parameters are kept."""
    for part in model.modules():
        if is_plain(part):
            part.__class__ = ReorderingLinear


def reordering_linears(model: nn.Module) -> list[ReorderingLinear]:
    """The layers of a model that can keep a copy."""
    return [part for part in model.modules() if isinstance(part, ReorderingLinear)]


def joined(parts: Sequence[nn.Linear]) -> ReorderingLinear:
    """One layer in place of several with the same input. Their weights, and biases if there are any, become
    views of its own, so what is written into them changes it, too."""
    biases = [part.bias for part in parts if part.bias is not None]
    size = parts[0].in_features, sum(part.out_features for part in parts)
    whole = ReorderingLinear(*size, bias=bool(biases), device="meta")
    whole.weight = _stacked([part.weight for part in parts])
    if biases:
        whole.bias = _stacked(biases)
    return whole


@torch.no_grad()
def _stacked(tensors: Sequence[Tensor]) -> nn.Parameter:
    # the next weight update could not write into inference-mode tensors
    with torch.inference_mode(False):
        stacked = torch.cat([tensor.data for tensor in tensors])
        for tensor, part in zip(tensors, stacked.split([len(tensor) for tensor in tensors]), strict=True):
            tensor.data = part
    return nn.Parameter(stacked, requires_grad=False)


def _way_of(weight: Tensor) -> _Way | None:
    """How to multiply LEAST_ROWS rows or more with a copy of this weight (N, K); None: without one."""
    if _is_onednns(weight):
        return _Way(partial(onednn_reordered, rows=LEAST_ROWS), onednn_product)
    if _is_mkls(weight) and keeps_bits_transposed(*weight.shape):
        return _Way(_transposed, _by_transposed)
    return None


def _is_onednns(weight: Tensor) -> bool:
    if weight.dtype == torch.bfloat16:
        is_onednns = cpu_has_bf16() and torch.backends.mkldnn.is_available()
        return weight.device.type == "cpu" and weight.is_contiguous() and is_onednns
    return weight.is_contiguous() and suits_onednn(weight)


def _is_mkls(weight: Tensor) -> bool:
    """With AVX-512."""
    is_float32 = weight.dtype == torch.float32 and weight.device.type == "cpu"
    return is_float32 and mkl_has_avx512() and torch.backends.mkl.is_available()


def _transposed(weight: Tensor) -> Tensor:
    return weight.t().contiguous()


def _by_transposed(x: Tensor, copy: Tensor, bias: Tensor | None) -> Tensor:
    if x.ndim != 2:
        return _by_transposed(x.flatten(0, -2), copy, bias).view(*x.shape[:-1], -1)
    return x @ copy if bias is None else torch.addmm(bias, x, copy)
