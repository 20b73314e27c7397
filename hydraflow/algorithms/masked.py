"""Sums over the tokens that a mask selects.

In: values and a mask of the same shape (bool, or numbers 0 and 1). Out: sums in the values' dtype. Values
where the mask is 0 never matter, NaN and infinity included: they are replaced, not multiplied by zero. Left
out on purpose: weights other than 0 and 1; the weights of a loss are in `aggregate.py`."""

from __future__ import annotations

from torch import Tensor


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with 0 where the mask is 0; no gradient flows there."""
    return values.masked_fill(~mask.bool(), 0.0)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of the selected values."""
    return keep(values, mask).sum()
