"""Statistics over the tokens that a mask selects.

In: values and a mask of the same shape (bool, or numbers 0 and 1). Out: statistics in the values' dtype.
Values where the mask is 0 never matter, NaN and infinity included: they are replaced, not multiplied by zero.
Left out on purpose: weights other than 0 and 1; the weights of a loss are in `aggregate.py`."""

from __future__ import annotations

import torch
from torch import Tensor


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with 0 where the mask is 0; no gradient flows there."""
    return values.masked_fill(~mask.bool(), 0.0)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the selected values, over everything or over one dimension."""
    return keep(values, mask).sum() if dim is None else keep(values, mask).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the selected values; 0 where nothing is selected.

    >>> import torch
    >>> masked_mean(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([1, 1, 0])).item()
    2.0
    """
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """The selected values moved to mean 0 and unbiased variance 1; 0 where the mask is 0.

    `(x - mean) / sqrt(var + eps)`. A single selected value becomes 0 (its variance is not defined; nothing is
    raised). Only the selected values are summed, so padding changes no bit.
    """
    selected = mask.bool()
    centred = values[selected] - values[selected].mean()
    variance = (centred**2).sum() / max(len(centred) - 1, 1)
    return torch.zeros_like(values).masked_scatter(selected, centred * (variance + eps).rsqrt())
