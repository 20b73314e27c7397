"""Attention to a cache, against transformers' `sdpa`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hydraflow.generation import attention
from hydraflow.generation.attention import cached_attention
from hydraflow.models import openblas


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", ["additive", "bool", ""])
@pytest.mark.parametrize(("heads", "keys", "scale"), [(4, 2, 0.4), (6, 1, None), (3, 3, 0.4)])
def test_by_openblas_it_is_as_exact_and_no_row_depends_on_another(
    heads: int,
    keys: int,
    scale: float | None,
    masked: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The keys are part of a cache with room for more tokens."""
    draw = torch.Generator().manual_seed(0)
    rows, tokens, dim = 20, 37, 16
    q = torch.randn(rows, heads, 1, dim, generator=draw).to(dtype)
    k, v = (torch.randn(rows, keys, tokens + 9, dim, generator=draw).to(dtype)[:, :, :tokens] for _ in "kv")
    mask = torch.zeros(rows, 1, 1, tokens)
    mask[::3, ..., :5] = -torch.inf
    module: Any = SimpleNamespace(num_key_value_groups=heads // keys, is_causal=True)

    def attend(some: slice, dtype: torch.dtype = dtype) -> Tensor:
        given = [one[some].to(dtype) for one in (q, k, v)]
        masks = {"additive": mask[some].to(dtype), "bool": mask[some] == 0, "": None}
        return cached_attention(module, *given, masks[masked], scaling=scale)[0]

    wanted = attend(slice(None), torch.float64)
    calls: list[None] = []
    real = openblas.product
    monkeypatch.setattr(openblas, "is_faster", lambda: True)
    monkeypatch.setattr(openblas, "product", lambda *given: (calls.append(None), real(*given))[1])
    found = attend(slice(None))
    # bfloat16 results are rounded once
    relative = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found.double(), wanted, rtol=relative, atol=1e-6)
    for some in (slice(0, 1), slice(3, 19)):
        assert torch.equal(attend(some), found[some])
    assert len(calls) == 6
    if dtype == torch.bfloat16:  # in parts, each of seven rows
        monkeypatch.setattr(attention, "_CONVERTED_AT_ONCE", 7 * keys * tokens * dim)
        assert torch.equal(attend(slice(None)), found)
        assert len(calls) == 12
        mask[:] = mask[0]
        wanted = attend(slice(None))
        mask = mask[:1]  # of all rows
        found = cached_attention(
            module, q, k, v, {"additive": mask, "bool": mask == 0, "": None}[masked], scaling=scale
        )[0]
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("heads", "tokens", "converted"),
    [(4, 1024, True), (4, 1025, False), (2, 2**16, True), (2, 2**16 + 1, False)],
)
def test_bfloat16_keys_are_converted_up_to_a_number(
    heads: int, tokens: int, converted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them where each query head has its own."""
    calls: list[None] = []
    real = openblas.product
    monkeypatch.setattr(openblas, "is_faster", lambda: True)
    monkeypatch.setattr(openblas, "product", lambda *given: (calls.append(None), real(*given))[1])
    q, k = (torch.ones(2, *shape, dtype=torch.bfloat16) for shape in ((heads, 1, 8), (2, tokens, 8)))
    module: Any = SimpleNamespace(num_key_value_groups=heads // 2, is_causal=True)
    found, _ = cached_attention(module, q, k, k, None, scaling=1.0)
    assert torch.equal(found, torch.ones(2, 1, heads, 8, dtype=torch.bfloat16))
    assert bool(calls) is converted


def test_no_rows_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openblas, "is_faster", lambda: True)
    q, k = (torch.ones(0, *shape, dtype=torch.bfloat16) for shape in ((4, 1, 8), (2, 7, 8)))
    module: Any = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    assert cached_attention(module, q, k, k, None, scaling=1.0)[0].shape == (0, 1, 4, 8)
