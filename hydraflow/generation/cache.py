"""The key-value cache of a batch that loses rows while it grows in length.

In: keys and values of new tokens, and selections of rows. Out: keys and values of all tokens so far. Left out
on purpose: paging. Rows of a wave have equal lengths, so a plain tensor with spare capacity wastes little.
Hugging Face's dynamic cache copies everything at every token; this one copies only when it is full.

Legend: B rows, H key-value heads, L tokens so far, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from hydraflow.models.config_keys import for_cache
from hydraflow.models.decoding_sizes import with_room


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer, (B, H, room, D), of which the first `length` tokens are in use."""

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Appends (B, H, new, D) and returns all tokens so far."""
        if self.length == 0:
            # no spare capacity for prompts: the rows sampled from them are copied into tensors with capacity
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values, self.length = key_states, value_states, key_states.shape[-2]
            return self.keys, self.values
        end = self.length + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            self.keys = self._with_room(self._used(self.keys), end)
            self.values = self._with_room(self._used(self.values), end)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self._used(self.keys), self._used(self.values)

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Selects rows, with repetition; the name is Hugging Face's."""
        self.keys = self._with_room(self._used(self.keys).index_select(0, beam_idx), self.length + 1)
        self.values = self._with_room(self._used(self.values).index_select(0, beam_idx), self.length + 1)

    def _used(self, states: Tensor) -> Tensor:
        return states[:, :, : self.length]

    @staticmethod
    def _with_room(states: Tensor, needed: int) -> Tensor:
        rows, heads, length, dim = states.shape
        grown = states.new_empty(rows, heads, with_room(needed), dim)
        grown[:, :, :length] = states
        return grown


def new_cache(config: PreTrainedConfig, *, growing: bool) -> Cache:
    """An empty cache: our own for models in which every layer attends to every token, else the one that
    transformers picks."""
    return Cache(layer_class_to_replicate=GrowingLayer) if growing else DynamicCache(config=for_cache(config))


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
