"""Causal attention by matrix products, a block of queries and a few megabytes of scores at a time.

torch's own CPU kernel takes up to five times as long for bfloat16 rows of a few dozen tokens, most of it in
the backward pass, and half as long again for rows of a thousand. For float32 rows of 200 to 1,000 tokens it
takes a fifth to a half longer (one core of an AMD EPYC); shorter ones are faster with it. Scores are computed
in the forward and again in the backward pass, so that none are kept; keys after a block's last query are left
out. Scores and probabilities are float32, as in torch's kernel.

Legend: B rows, h heads of queries, k heads of keys and values, g = h / k, W tokens of a row, d head
dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hydraflow.device import cpu_has_bf16

FASTER = {torch.bfloat16: range(1, 2049), torch.float32: range(192, 1025)}
"""Tokens of the rows for which this is faster, measured with one thread."""
_BLOCK = 64
"""Queries of a row that are computed together."""
_SCORE_BYTES = 2 * 2**20
"""Bytes of scores that exist at a time; they fit into the caches of one core."""


def are_faster(query: Tensor) -> bool:
    """Whether to attend by products: query (B, h, W, d)."""
    if query.device.type != "cpu" or query.shape[2] not in FASTER.get(query.dtype, ()):
        return False
    return query.dtype != torch.bfloat16 or cpu_has_bf16()


class AttendByProducts(torch.autograd.Function):
    """Queries (B, h, W, d), keys (B, k, W, d), values (B, k, W, v), scale, and an additive causal mask (W, W)
    of float32 or float64 to (B, h, W, v).

    Queries that share keys are lines of one matrix, g for each token.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> Tensor:
        ctx.shapes, ctx.scale, ctx.mask = (q.shape, k.shape, v.shape), scale, mask
        rows, heads, width, dim = q.shape
        q = q.reshape(rows * k.shape[1], -1, width, dim)
        k, v = (x.reshape(-1, width, x.shape[-1]) for x in (k, v))
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        for some, block, end in _blocks(q):
            p = _probabilities(q[some, :, block].flatten(1, 2), k[some, :end], mask[block, :end], scale)
            out[some, :, block] = torch.bmm(p.to(q.dtype), v[some, :end]).unflatten(1, (q.shape[1], -1))
        ctx.save_for_backward(q, k, v)
        return out.view(rows, heads, width, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v = ctx.saved_tensors
        mask, (shared, width) = ctx.mask, q.shape[1:3]
        grad = grads[0].reshape(*q.shape[:3], -1)
        summed = mask.dtype if width > _BLOCK else q.dtype
        to_q, to_k, to_v = (
            torch.empty_like(q),
            torch.empty_like(k, dtype=summed),
            torch.empty_like(v, dtype=summed),
        )
        for some, block, end in _blocks(q):
            queries, of_out = q[some, :, block].flatten(1, 2), grad[some, :, block].flatten(1, 2)
            p = _probabilities(queries, k[some, :end], mask[block, :end], ctx.scale)
            of_v = torch.bmm(p.to(q.dtype).transpose(1, 2), of_out)
            to_p = torch.bmm(of_out, v[some, :end].transpose(1, 2)).to(p.dtype)
            to_scores = torch._softmax_backward_data(to_p, p, -1, p.dtype).mul_(ctx.scale).to(q.dtype)
            to_q[some, :, block] = torch.bmm(to_scores, k[some, :end]).unflatten(1, (shared, -1))
            of_k = torch.bmm(to_scores.transpose(1, 2), queries)
            if end == width:  # the first block
                to_k[some], to_v[some] = of_k, of_v
            else:
                to_k[some, :end] += of_k
                to_v[some, :end] += of_v
        of_q, of_k, of_v = ctx.shapes
        return to_q.view(of_q), to_k.to(k.dtype).view(of_k), to_v.to(v.dtype).view(of_v), None, None


def _probabilities(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """(n, g * w, e) of w queries and e keys of n heads of keys, in the type of the mask (w, e)."""
    q, k = q.to(mask.dtype), k.to(mask.dtype)
    mask = mask.repeat(q.shape[1] // len(mask), 1)
    return torch.baddbmm(mask.expand(len(q), -1, -1), q, k.transpose(1, 2), alpha=scale).softmax(-1)


def _blocks(q: Tensor) -> Iterator[tuple[slice, slice, int]]:
    """Heads of keys and queries that are computed at a time, and the number of keys that these queries see;
    each head's last queries first. q: (n, g, W, d)."""
    count, shared, width, _ = q.shape
    heads = max(1, _SCORE_BYTES // (4 * shared * min(width, _BLOCK) * width))
    starts = range(0, width, _BLOCK)[::-1]
    for first in range(0, count, heads):
        for start in starts:
            end = min(width, start + _BLOCK)
            yield slice(first, first + heads), slice(start, end), end
