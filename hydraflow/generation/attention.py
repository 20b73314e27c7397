"""Attention for decoding: one new token per row against the KV cache, grouped by key heads (GQA).

In: queries (B, h, 1, d), keys and values (B, k, L, d) or those of groups of rows (`widths.py`), an additive
mask. Out: as transformers' `sdpa`, up to rounding. For every token, `sdpa` repeats the whole cache's keys and
values for all query heads. Here the g = h / k query heads that share a key head become g queries of one head.
Left out on purpose: prompts, and values whose width differs from the keys' (a row's last bits would depend on
its neighbours); `sdpa` itself handles both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hydraflow.generation.widths import KeysOfGroups

NAME = "hydraflow_cached"


def register_attention() -> None:
    """Makes `attn_implementation=NAME` known to transformers in this process, with the masks of `sdpa`."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, cached_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@contextmanager
def in_use(model: PreTrainedModel) -> Iterator[None]:
    """Selects this attention for one forward pass of a model that otherwise uses `sdpa`. Not for longer,
    because other models may share the configuration."""
    config = model.config.get_text_config()
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | KeysOfGroups,
    value: Tensor | list[Tensor],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: (B, h, new, d) to (B, new, h, v). Of several groups of rows
    (`widths.py`), each is computed alone."""
    if isinstance(key, KeysOfGroups):
        parts = zip(query.split([len(part) for part in value]), key.parts, value, key.masks, strict=True)
        each = [cached_attention(module, *part, scaling=scaling, **others)[0] for part in parts]
        return torch.cat(each), None
    assert isinstance(value, Tensor)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    rows, heads, new, dim = query.shape
    repeats = heads > key.shape[1] and dim == value.shape[-1] and others.get("position_bias") is None
    if new > 1 or not repeats:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return output, None
    grouped = query.reshape(rows, key.shape[1], -1, dim)
    mask = None if attention_mask is None else attention_mask.expand(-1, -1, grouped.shape[2], -1)
    found = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return found.reshape(rows, 1, heads, -1), None
