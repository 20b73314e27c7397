"""The key-value cache of a batch that loses rows while it grows in length.

In: keys and values of new tokens, and selections of rows. Out: the keys and values that the new tokens attend
to. Left out on purpose: paging. Rows of a wave have equal lengths, so a plain tensor with spare capacity
wastes little. Hugging Face's dynamic cache copies everything at every token; this one copies only when it is
full.

Legend: B rows, H key-value heads, L tokens so far, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hydraflow.models.config_keys import for_cache
from hydraflow.models.decoding_sizes import with_room


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer, (B, H, room, D), of which the first `length` tokens are filled."""

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Appends (B, H, new, D) and returns all tokens that the new ones may attend to."""
        if not self.is_initialized:
            # no spare capacity for prompts: the rows sampled from them are copied into tensors with capacity
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values, self.length = key_states, value_states, key_states.shape[-2]
            return self.keys, self.values
        new = key_states.shape[-2]
        if self.length + new > self.keys.shape[-2]:
            self._copy(new)
        start, end = self.length - self._seen(), self.length + new
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, start:end], self.values[:, :, start:end]

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Selects rows, with repetition; the name is Hugging Face's. A layer may have no keys of its own."""
        if self.is_initialized:
            self._copy(1, beam_idx)

    def _seen(self) -> int:
        """Tokens of the cache that the next one attends to."""
        return self.length

    def _copy(self, new: int, rows: Tensor | None = None) -> None:
        """Moves what later tokens attend to, of these rows or of all, into tensors with room for `new`
        more."""
        used = slice(self.length - self._seen(), self.length)
        self.keys = _with_room(self.keys[:, :, used], new, rows)
        self.values = _with_room(self.values[:, :, used], new, rows)
        self.length = used.stop - used.start


class SlidingLayer(GrowingLayer):
    """The same where a token attends to the last `sliding_window` tokens, itself among them."""

    is_sliding = True
    get_mask_sizes = DynamicSlidingWindowLayer.get_mask_sizes

    def __init__(self, sliding_window: int) -> None:
        super().__init__()
        self.sliding_window, self.cumulative_length = sliding_window, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.cumulative_length += key_states.shape[-2]
        return super().update(key_states, value_states)

    def get_seq_length(self) -> int:
        """Tokens so far, also those out of sight."""
        return self.cumulative_length

    def _seen(self) -> int:
        return min(self.length, self.sliding_window - 1)


def _with_room(states: Tensor, new: int, rows: Tensor | None) -> Tensor:
    """A copy of (B, H, L, D), or of these rows of it, with capacity for at least `new` more tokens."""
    states = states if rows is None else states.index_select(0, rows)
    count, heads, length, dim = states.shape
    grown = states.new_empty(count, heads, with_room(length + new), dim)
    grown[:, :, :length] = states
    return grown


_OURS: dict[type, Callable[[Any], GrowingLayer]] = {
    DynamicLayer: lambda _: GrowingLayer(),
    DynamicSlidingWindowLayer: lambda layer: SlidingLayer(layer.sliding_window),
}
"""Layers of transformers' cache -> ours in their place."""


def new_cache(config: PreTrainedConfig, *, pads: bool, mixes: bool) -> Cache:
    """An empty cache for a model whose forward `pads` or `mixes` (`forward.py`): then all of its layers are
    our own, or those for which there is one. Otherwise it is transformers' own."""
    if pads:
        return Cache(layer_class_to_replicate=GrowingLayer)
    cache = DynamicCache(config=for_cache(config))
    if mixes:
        cache.layers = [_OURS.get(type(layer), lambda same: same)(layer) for layer in cache.layers]
    return cache


def join_rows(caches: Sequence[Cache]) -> Cache:
    """Joins the rows of several growing caches of equal length in the first one. A single cache, of any kind,
    is returned as it is."""
    first = caches[0]
    if len(caches) == 1:
        return first
    for layer, *others in zip(*(cache.layers for cache in caches), strict=True):
        assert isinstance(layer, GrowingLayer)
        layer.keys = torch.cat([layer.keys, *(other.keys for other in others)])
        layer.values = torch.cat([layer.values, *(other.values for other in others)])
    return first
