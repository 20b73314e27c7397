"""Copies of weights in the order in which oneDNN multiplies, for layers that run once for every token.

oneDNN reorders a matrix before it multiplies with it, which takes as long as the product of 16 rows: the
matrices of 31.7 million parameters take 20 ms in float32 and 12 in bfloat16, reordered ones 12.5 and 7 (one
core of an AMD EPYC). The bits are the same. The copies exist while a wave is decoded, as its caches do.
In: a model for generation. Out: the same model, whose plain linear layers can be told to keep a copy. Left
out on purpose: products for which torch does not use oneDNN (`models/linear.py`), and experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hydraflow.device import cpu_has_bf16, onednn_product, onednn_reordered
from hydraflow.models.decoding_sizes import LEAST_ROWS
from hydraflow.models.linear import Linear, is_plain, linear, suits_onednn


class ReorderingLinear(Linear):
    """A linear layer that keeps a reordered copy of its weight between `keep_copy` and `drop_copy`."""

    _keeps = False
    _copy: Tensor | None = None

    def keep_copy(self) -> None:
        """From its next use on it has a copy, if oneDNN multiplies with this weight."""
        self._keeps = _is_reordered(self.weight)

    def drop_copy(self) -> None:
        """Drops the copy. To be called before the weight changes."""
        self._keeps, self._copy = False, None

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N), without a gradient if there is a copy. Experts that are layers of their own
        may get few rows, for which oneDNN is not used."""
        if not self._keeps or x.numel() < LEAST_ROWS * x.shape[-1]:
            return linear(x, self.weight, self.bias)
        if self._copy is None:
            self._copy = onednn_reordered(self.weight, LEAST_ROWS)
        return onednn_product(x, self._copy, self.bias)


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


def _is_reordered(weight: Tensor) -> bool:
    """Whether every product with this weight (N, K), of LEAST_ROWS rows or more, is oneDNN's."""
    if weight.dtype == torch.bfloat16:
        is_onednns = cpu_has_bf16() and torch.backends.mkldnn.is_available()
        return weight.device.type == "cpu" and weight.is_contiguous() and is_onednns
    return weight.is_contiguous() and suits_onednn(weight)
