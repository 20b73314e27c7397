"""Layers of the key-value cache against transformers' own: the same keys, values and sizes of masks, without
a copy for every token."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma2Config
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hydraflow.generation.cache import GrowingLayer, SlidingLayer, new_cache


@pytest.mark.parametrize("window", [None, 2, 5, 24, 64])
@pytest.mark.parametrize("prompt", [1, 4, 5, 30])
def test_a_layer_that_grows_and_loses_rows(window: int | None, prompt: int) -> None:
    draw = torch.Generator().manual_seed(prompt)
    ours = GrowingLayer() if window is None else SlidingLayer(window)
    theirs = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
    assert (ours.get_seq_length(), ours.is_sliding) == (0, theirs.is_sliding)
    rows, copies = 3, 0
    for step in range(60):
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)
        new = torch.randn(2, rows, 2, 1 if step else prompt, 4, generator=draw)
        before = ours.keys.data_ptr() if step else 0
        for mine, right in zip(ours.update(*new), theirs.update(*new), strict=True):
            assert torch.equal(mine, right)
        copies += ours.keys.data_ptr() != before
        assert ours.get_seq_length() == theirs.get_seq_length() == prompt + step
        if step in (0, 17, 18, 40):
            chosen = torch.randint(rows, (5 if step == 0 else rows - 1,), generator=draw).sort().values
            rows = len(chosen)
            ours.reorder_cache(chosen)
            theirs.reorder_cache(chosen)
    assert copies <= 12


def test_a_layer_that_attends_to_anothers_keys_has_no_rows_to_select() -> None:
    layer = SlidingLayer(4)
    layer.reorder_cache(torch.tensor([0]))
    assert layer.get_seq_length() == 0


@pytest.mark.parametrize("mixes", [True, False])
def test_layers_beside_those_with_a_window_grow_in_place_too(mixes: bool) -> None:
    """If rows of several widths are decoded together; otherwise transformers' own layers hold the cache."""
    cache = new_cache(Gemma2Config(num_hidden_layers=2, sliding_window=6), pads=False, mixes=mixes)
    windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
    assert windows == [6, None] and [layer.is_sliding for layer in cache.layers] == [True, False]
    assert [isinstance(layer, GrowingLayer) for layer in cache.layers] == [mixes, mixes]
