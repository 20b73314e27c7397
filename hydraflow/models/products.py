"""Causal attention by matrix products, a block of queries and a few megabytes of scores at a time.

torch's own CPU kernel takes up to five times as long for bfloat16 rows of a few dozen tokens, most of it in
the backward pass. How it compares for longer rows depends on the processor. On an AMD EPYC it takes half as
long again for bfloat16 rows of a thousand, a fifth to a half longer for float32 rows of 200 to 1,000, and
with OpenBLAS (`openblas.py`) from 16 tokens on, up to twice as long. On an Intel Xeon with AMX it takes two
thirds of the time in the forward pass, and is used there; in the backward pass it takes half as long again
for bfloat16 rows of 260, as long for 500, and less for float32. Scores are computed again in the backward
pass, so that none are kept; keys after a block's last query are left out. Scores and probabilities are
float32, as in torch's kernel.

Legend: B rows, h heads of queries, k heads of keys and values, g = h / k, W tokens of a row, w tokens of a
block, e keys that it sees, d head dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hydraflow.device import cpu_has_bf16, mkl_has_avx512
from hydraflow.models import openblas
from hydraflow.models.chunks import chunk_slices, equal_slices


@dataclass(frozen=True)
class Measured:
    """What is fastest on a kind of processor, measured with one thread."""

    faster: Mapping[torch.dtype, range]
    """Tokens of the rows for which this is faster than torch's kernel."""
    score_bytes: int
    """Bytes of scores that exist at a time; they fit into the caches of one core."""
    forward_by_torch: bool = False
    """Leave the forward pass to torch's kernel."""


ON_INTEL = Measured({torch.bfloat16: range(1, 401)}, 4 * 2**20, forward_by_torch=True)
"""Where MKL has AVX-512."""
ELSEWHERE = Measured({torch.bfloat16: range(1, 2049), torch.float32: range(192, 1025)}, 2 * 2**20)
FASTER_BY_OPENBLAS = range(16, 2049)
"""Tokens of float32 rows for which this is faster by OpenBLAS. Longer rows are faster as well, but need a
mask of 64 MiB."""
_BLOCK = 64
"""Queries of a row that are computed together."""


def measured() -> Measured:
    """What was measured on this kind of processor."""
    return ON_INTEL if mkl_has_avx512() else ELSEWHERE


def are_faster(query: Tensor) -> bool:
    """Whether to attend by products: query (B, h, W, d)."""
    if openblas.suits(query) and query.shape[2] in FASTER_BY_OPENBLAS:
        return True
    if query.device.type != "cpu" or query.shape[2] not in measured().faster.get(query.dtype, ()):
        return False
    return query.dtype != torch.bfloat16 or cpu_has_bf16()


class AttendByProducts(torch.autograd.Function):
    """Queries (B, h, W, d), keys (B, k, W, d), values (B, k, W, v), scale, an additive causal mask (W, W) of
    float32 or float64, the rows' lengths in descending order, and the window of the mask, if it has one, to
    (B, h, W, v).

    Queries that share keys are lines of one matrix, g for each token. Blocks of nothing but padding need not
    be computed: results and gradients there are arbitrary.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        mask: Tensor,
        lengths: Sequence[int],
        window: int | None,
    ) -> Tensor:
        if not openblas.suits(q):
            q, k, v = (x.contiguous() for x in (q, k, v))  # or torch would copy them block by block
        lines = q.unflatten(1, (k.shape[1], -1))
        ctx.save_for_backward(lines, k, v)
        ctx.scale, ctx.mask, ctx.lengths = scale, mask, lengths
        dim = v.shape[-1]
        if measured().forward_by_torch and window is None and dim == q.shape[-1]:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        q = lines
        out = torch.empty_like(q) if dim == q.shape[-1] else q.new_empty(*q.shape[:-1], dim)
        for rows, heads, block, seen, _ in _blocks(q, lengths):
            queries = _scaled(q[rows, heads, :, block], scale)
            p = _probabilities(queries, k[rows, heads, seen], mask[block, seen], scale)
            found = _product(p.to(q.dtype), v[rows, heads, seen])
            out[rows, heads, :, block] = found.unflatten(2, (q.shape[2], -1))
        return out.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        mask, (shared, width) = ctx.mask, q.shape[2:4]
        grad = grads[0] if openblas.suits(q) else grads[0].contiguous()
        grad = grad.unflatten(1, (-1, shared))
        summed = mask.dtype if width > _BLOCK else q.dtype
        to_q = torch.empty_like(q)
        to_k, to_v = (torch.empty_like(x, dtype=summed) for x in (k, v))
        for rows, heads, block, seen, first in _blocks(q, ctx.lengths):
            queries, keys, values = q[rows, heads, :, block], k[rows, heads, seen], v[rows, heads, seen]
            queries = _scaled(queries, ctx.scale)
            of_out = grad[rows, heads, :, block].flatten(2, 3)
            p = _probabilities(queries, keys, mask[block, seen], ctx.scale)
            of_v = _product(p.to(q.dtype).mT, of_out)
            to_p = _product(of_out, values.mT).to(p.dtype)
            to_scores = torch._softmax_backward_data(to_p, p, -1, p.dtype)
            if openblas.suits(q):
                of_q = _product(to_scores, keys).mul_(ctx.scale)
            else:
                to_scores = to_scores.mul_(ctx.scale).to(q.dtype)
                of_q = _product(to_scores, keys)
            to_q[rows, heads, :, block] = of_q.unflatten(2, (shared, -1))
            of_k = _product(to_scores.mT, queries.flatten(2, 3))
            if first:
                to_k[rows, heads, seen], to_v[rows, heads, seen] = of_k, of_v
            else:
                to_k[rows, heads, seen] += of_k
                to_v[rows, heads, seen] += of_v
        return to_q.flatten(1, 2), to_k.to(k.dtype), to_v.to(v.dtype), None, None, None, None


def _product(a: Tensor, b: Tensor) -> Tensor:
    """(n, m, K, L) and (n, m, L, M) to (n, m, K, M)."""
    if openblas.suits(a):
        return openblas.product(a, b)
    # transposed after merging dimensions: before that, torch copies some transposed matrices of bfloat16
    batches = (x.flatten(0, 1) if x.stride(-1) == 1 else x.mT.flatten(0, 1).mT for x in (a, b))
    return torch.bmm(*batches).unflatten(0, a.shape[:2])


def _scaled(q: Tensor, scale: float) -> Tensor:
    """What `_probabilities` takes of queries: scaled ones for OpenBLAS. Otherwise it scales the scores."""
    return q * scale if openblas.suits(q) else q


def _probabilities(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """(n, m, g w, e) of `_scaled` queries (n, m, g, w, d) and keys (n, m, e, d), in the type of the mask
    (w, e)."""
    if openblas.suits(q):
        scores = openblas.product(q.flatten(2, 3), k.mT)
        scores.unflatten(2, q.shape[2:4]).add_(mask)
        return scores.softmax(-1)
    q, k = q.to(mask.dtype), k.to(mask.dtype)
    mask = mask.repeat(q.shape[2], 1).expand(q.shape[0] * q.shape[1], -1, -1)
    scores = torch.baddbmm(mask, q.flatten(0, 1).flatten(1, 2), k.flatten(0, 1).mT, alpha=scale)
    return scores.softmax(-1).unflatten(0, q.shape[:2])


def _blocks(q: Tensor, lengths: Sequence[int]) -> Iterator[tuple[slice, slice, slice, slice, bool]]:
    """Rows, heads of keys, queries of each that are computed at a time, the keys that these queries see, and
    whether this is the first block of these rows; a row's last queries first. q: (B, k, g, W, d)."""
    _, heads, shared, width, _ = q.shape
    of_head = 4 * shared * min(width, _BLOCK) * width
    at_a_time = measured().score_bytes
    ends = [min(width, -(-one // _BLOCK) * _BLOCK) for one in lengths]
    for end, run in itertools.groupby(range(len(ends)), ends.__getitem__):
        first, *others = run
        rows = equal_slices(1 + len(others), max(1, at_a_time // (of_head * heads)))
        for some, of_keys in itertools.product(rows, chunk_slices(heads, max(1, at_a_time // of_head))):
            of_rows = slice(first + some.start, first + some.stop)
            for start in range(0, end, _BLOCK)[::-1]:
                stop = min(end, start + _BLOCK)
                yield of_rows, of_keys, slice(start, stop), slice(stop), stop == end
