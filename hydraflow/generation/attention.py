"""Attention for decoding: one new token per row against the KV cache, grouped by key heads (GQA).

In: queries (B, h, 1, d), keys and values (B, k, L, d) or those of groups of rows (`widths.py`), an additive
mask. Out: as transformers' `sdpa`, up to rounding, or as its eager attention. For every token, `sdpa` repeats
the whole cache's keys and values for all query heads. Here the g = h / k query heads that share a key head
become g queries of one head, and products by OpenBLAS take the place of torch's kernel where they suit
(`models/openblas.py`): they take half its time for rows of 128 tokens, a little less than it for 30.
bfloat16 keys and values are first converted to float32, up to a number of them. These figures are for 16 rows
or more of one length; a single row of bfloat16 takes three to four times as long as in torch's kernel, but
its bits may not depend on how many there are. Models that need more than `sdpa` offers (soft-capped scores,
sinks) keep their own eager attention; only the split into groups is ours. Left out on purpose: prompts, and
values whose width differs from the keys' (a row's last bits would depend on its neighbours); `sdpa` itself
handles both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hydraflow.generation.widths import KeysOfGroups
from hydraflow.models import openblas

Attention = Callable[..., tuple[Tensor, Tensor | None]]
OURS = {"sdpa": "hydraflow_cached", "eager": "hydraflow_cached_eager"}
"""A model's own attention implementation -> ours in its place, with the same masks."""
_MOST_CONVERTED = 2**14
"""Numbers in a row's bfloat16 keys up to which they are converted for OpenBLAS: 64 rows then take 20 to 60 %
less time than in torch's kernel, and 16 rows at most as long. From 2**15 on they may take twice as long."""
_CONVERTED_AT_ONCE = 2**20
"""Numbers in keys that are converted at once, with as many values; more would not stay in the caches. Also
the most of a row where each query head has its own keys, for which torch's kernel takes 1.5 to 3 times as
long."""


def register_attention() -> None:
    """Makes the values of OURS known to transformers in this process."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for own, function in (("sdpa", cached_attention), ("eager", cached_eager_attention)):
        ALL_ATTENTION_FUNCTIONS.register(OURS[own], function)
        ALL_MASK_ATTENTION_FUNCTIONS.register(OURS[own], ALL_MASK_ATTENTION_FUNCTIONS[own])


@contextmanager
def in_use(model: PreTrainedModel) -> Iterator[None]:
    """Selects this attention for one forward pass of a model. Not for longer, because other models may share
    the configuration."""
    config = model.config.get_text_config()
    own = config._attn_implementation
    config._attn_implementation = OURS[own]
    try:
        yield
    finally:
        config._attn_implementation = own


def by_groups(attend: Attention) -> Attention:
    """Lets an attention function also take keys and values of several groups of rows (`widths.py`): it
    computes each group alone."""

    @wraps(attend)
    def of_groups(
        module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Tensor | None, **others: Any
    ) -> tuple[Tensor, Tensor | None]:
        if not isinstance(key, KeysOfGroups):
            return attend(module, query, key, value, attention_mask, **others)
        parts = zip(query.split([len(part) for part in value]), key.parts, value, key.masks, strict=True)
        return torch.cat([attend(module, *part, **others)[0] for part in parts]), None

    return of_groups


@by_groups
def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: (B, h, new, d) to (B, new, h, v)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    rows, heads, new, dim = query.shape
    suits = new == 1 and dim == value.shape[-1] and others.get("position_bias") is None
    if suits:
        grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], dim)
        if heads > key.shape[1] or _by_openblas(grouped, key):
            found = attend(grouped, key, value, attention_mask, scaling)
            return found.reshape(rows, 1, heads, dim), None
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    return output, None


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """One token of each row: (B, k, g, d), queries that share a key head together, keys and values
    (B, k, L, d), an additive mask or one of bool (B, 1, 1, L), to (B, k, g, d). Every row sees at least one
    key."""
    if not _by_openblas(q, k):
        wide = None if mask is None else mask.expand(-1, -1, q.shape[2], -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=wide, scale=scale)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    at_once = _CONVERTED_AT_ONCE // k.shape[1:].numel()
    if q.dtype == torch.float32 or len(q) <= at_once:
        return _products(q, k, v, mask, scale)
    masks = [mask] * len(q.split(at_once)) if mask is None or len(mask) == 1 else mask.split(at_once)
    parts = zip(q.split(at_once), k.split(at_once), v.split(at_once), masks, strict=True)
    return torch.cat([_products(*part, scale) for part in parts])


def _by_openblas(q: Tensor, k: Tensor) -> bool:
    """Whether to `attend` by OpenBLAS. It depends on a row alone, not on how many there are."""
    if q.dtype == torch.bfloat16:
        most = _CONVERTED_AT_ONCE if q.shape[2] == 1 else _MOST_CONVERTED
        return k.shape[1:].numel() <= most and q.device.type == "cpu" and openblas.is_faster()
    return openblas.suits(q)


def _products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """`attend` in float32."""
    dtype = q.dtype
    q, k, v = q.float(), k.float(), v.float()
    scores = openblas.product(q * scale, k.mT)
    if mask is not None and mask.dtype == torch.bool:
        scores.masked_fill_(~mask, -torch.inf)
    elif mask is not None:
        scores += mask
    return openblas.product(scores.softmax(-1), v).to(dtype)


@by_groups
def cached_eager_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The model's own eager attention. It would repeat a single key head without a copy, and torch would sum
    its product in an order that depends on the number of rows: so it gets a copy, and nothing to repeat."""
    # what transformers calls for `eager`: a global of the file that defines the layer's forward
    eager = inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"]
    repeats = getattr(module, "num_key_value_groups", 1)
    if key.shape[1] > 1 or repeats == 1:
        return eager(module, query, key, value, attention_mask, **others)
    module.num_key_value_groups = 1
    try:
        copies = (x.repeat(1, repeats, 1, 1) for x in (key, value))
        return eager(module, query, *copies, attention_mask, **others)
    finally:
        module.num_key_value_groups = repeats
