"""Attention to a cache, against transformers' `sdpa`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hydraflow.generation.attention import cached_attention


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("heads", "keys", "new"), [(4, 2, 1), (4, 1, 1), (4, 4, 1), (4, 2, 3)])
def test_it_is_that_of_sdpa(heads: int, keys: int, new: int, masked: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(3, tokens, count, 8, generator=draw, dtype=torch.float64).transpose(1, 2)
        for tokens, count in ((new, heads), (7, keys), (7, keys))
    )
    mask = torch.zeros(3, 1, new, 7, dtype=torch.float64)
    mask[1, :, :, :4] = -torch.inf
    module: Any = SimpleNamespace(num_key_value_groups=heads // keys, is_causal=True)
    given = mask if masked else None
    wanted, _ = sdpa_attention_forward(module, q, k, v, given, scaling=0.4)
    found, _ = cached_attention(module, q, k, v, given, scaling=0.4)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_keys_are_not_repeated_for_a_new_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.integrations.sdpa_attention.repeat_kv", None)
    q, k = torch.ones(2, 4, 1, 8), torch.ones(2, 2, 7, 8)
    module: Any = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    found, _ = cached_attention(module, q, k, k, torch.zeros(2, 1, 1, 7), scaling=1.0)
    assert torch.equal(found, torch.ones(2, 1, 4, 8))
