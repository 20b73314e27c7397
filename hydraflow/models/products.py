"""Causal attention by matrix products, a few megabytes of scores at a time.

torch's own CPU kernel takes up to five times as long for bfloat16 rows of a few dozen tokens, most of it in
the backward pass; for rows of a thousand it is faster. Scores are computed in the forward and again in the
backward pass, so that none are kept. They and the probabilities are float32, as in torch's kernel.

Legend: B rows, h heads of queries, k heads of keys and values, g = h / k, W tokens of a row, d head
dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hydraflow.device import cpu_has_bf16

LONGEST = 512
"""Tokens of the longest rows for which this is faster."""
_SCORE_BYTES = 4 * 2**20
"""Bytes of scores that exist at a time; they fit into the caches of one core."""


def are_faster(query: Tensor, key: Tensor) -> bool:
    """Whether to attend by products: query (B, h, W, d), key (B, k, W, d)."""
    width, shared = query.shape[2], query.shape[1] // key.shape[1]
    return (
        query.device.type == "cpu"
        and query.dtype == torch.bfloat16
        and cpu_has_bf16()
        and width <= LONGEST
        and 4 * shared * width**2 <= _SCORE_BYTES
    )


class AttendByProducts(torch.autograd.Function):
    """Queries (B, h, W, d), keys (B, k, W, d), values (B, k, W, v), scale, and an additive mask (W, W)
    of float32 or float64 to (B, h, W, v).

    Queries that share keys are one matrix of g * W lines.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> Tensor:
        ctx.shapes, ctx.scale, ctx.mask = (q.shape, k.shape, v.shape), scale, mask
        (rows, heads, width, dim), shared = q.shape, q.shape[1] // k.shape[1]
        q = q.reshape(-1, shared * width, dim)
        k, v = (x.reshape(-1, width, x.shape[-1]) for x in (k, v))
        mask = mask.repeat(shared, 1)
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        for part in _parts(q, width):
            p = _probabilities(q[part], k[part], mask, scale)
            torch.bmm(p.to(q.dtype), v[part], out=out[part])
        ctx.save_for_backward(q, k, v)
        return out.view(rows, heads, width, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v = ctx.saved_tensors
        mask = ctx.mask.repeat(q.shape[1] // k.shape[1], 1)
        grad = grads[0].reshape(*q.shape[:2], -1)
        to_q, to_k, to_v = (torch.empty_like(x) for x in (q, k, v))
        for part in _parts(q, k.shape[1]):
            p = _probabilities(q[part], k[part], mask, ctx.scale)
            torch.bmm(p.to(q.dtype).transpose(1, 2), grad[part], out=to_v[part])
            to_p = torch.bmm(grad[part], v[part].transpose(1, 2)).to(p.dtype)
            to_scores = torch._softmax_backward_data(to_p, p, -1, p.dtype).mul_(ctx.scale).to(q.dtype)
            torch.bmm(to_scores, k[part], out=to_q[part])
            torch.bmm(to_scores.transpose(1, 2), q[part], out=to_k[part])
        of_q, of_k, of_v = ctx.shapes
        return to_q.view(of_q), to_k.view(of_k), to_v.view(of_v), None, None


def _probabilities(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """(n, g * W, W) of n heads of keys, in the mask's type."""
    q, k = q.to(mask.dtype), k.to(mask.dtype)
    return torch.baddbmm(mask.expand(len(q), -1, -1), q, k.transpose(1, 2), alpha=scale).softmax(-1)


def _parts(q: Tensor, width: int) -> list[slice]:
    """Heads of keys that are computed at a time."""
    heads = max(1, _SCORE_BYTES // (4 * q.shape[1] * width))
    return [slice(first, first + heads) for first in range(0, len(q), heads)]
