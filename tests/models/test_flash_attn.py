"""How flash-attn's kernel is called. It runs on GPUs only; here a function with its arguments and their
meaning, as flash-attn 2 documents them, computes in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hydraflow.models import attention

CPU = torch.device("cpu")


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """q (N, h, d), k and v (N, fewer heads, d). A query at place i sees the keys from i - left to i + right;
    -1 is no bound."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert deterministic and not dropout_p and not softcap
    starts = cu_seqlens_q.tolist()
    assert starts == cu_seqlens_k.tolist() and max_seqlen_q == max_seqlen_k == max(np.diff(starts))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = window_size
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = torch.empty_like(v)
    for first, end in zip(starts, starts[1:], strict=False):
        place = torch.arange(end - first)
        ahead = place[None, :] - place[:, None]  # of the key, seen from the query
        hidden = (ahead > 0) if causal else torch.zeros_like(ahead, dtype=torch.bool)
        if left >= 0:
            hidden |= ahead < -left
        if right >= 0:
            hidden |= ahead > right
        scores = torch.einsum("qhd,khd->hqk", q[first:end], k[first:end]) * scale
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[first:end] = torch.einsum("hqk,khd->qhd", probs, v[first:end])
    return out


@pytest.mark.parametrize("lengths", [[5], [7, 3, 1, 12], [4, 4]])
@pytest.mark.parametrize(("window", "scale"), [(None, None), (3, 0.7), (1, None), (100, 0.2)])
def test_flash_attn_gives_what_blocks_give(
    lengths: list[int], window: int | None, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "flash_kernel", lambda: flash_attn_varlen_func)
    plan = attention.plan_rows(np.array(lengths), CPU)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), heads, 8, generator=draw, dtype=torch.float64).requires_grad_()
        for heads in (4, 2, 2)
    )
    found, wanted = (
        attend(q, k, v, plan, scale, window) for attend in (attention._varlen, attention._grouped)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    grad = torch.randn(wanted.shape, generator=draw, dtype=torch.float64)
    for mine, other in zip(
        torch.autograd.grad(found, (q, k, v), grad), torch.autograd.grad(wanted, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
