"""Causal attention over packed rows: tokens of many rows in one sequence, each token sees only its own row.

In: query, key and value of shape (1, heads, N, d) and a `RowPlan` with the row boundaries. Out: (1, N, heads,
d). `register_attention()` makes it known to transformers; models are then built with
`attn_implementation=NAME`. On a GPU, rows in 16 bits take flash-attn's kernel where it is installed, else
torch's. In float32 and on a CPU, rows of similar length form one right-padded block, which needs no mask
tensor, so that each block is one fast call, or on a CPU plain matrix products where they are faster
(`products.py`). Left out on purpose: dropout, attention soft-capping and sinks (those models take the padded
path).
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from hydraflow.device import in_fixed_order
from hydraflow.models import products
from hydraflow.models.windows import window_of

NAME = "hydraflow_varlen"
_log = logging.getLogger(__name__)
_SHORT, _FREE_PADDING = 64, 512
"""Up to this width, this many padded tokens are cheaper than another call."""


@dataclass(frozen=True)
class RowGroup:
    """Rows of these `lengths`, in descending order, that are computed together: padded to the first of them,
    starting at `start` in the padded line."""

    start: int
    lengths: tuple[int, ...]

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def width(self) -> int:
        return self.lengths[0]


@dataclass(frozen=True)
class SharedPrompts:
    """Maps a line, in which rows that share a prompt hold it only once, to the T tokens of the whole rows,
    one row after another. Attention sees whole rows; everything else runs on the line."""

    to_rows: torch.Tensor
    """(T,) position in the line of every row's tokens."""
    to_line: torch.Tensor
    """(N,) for each token of the line, one of its places in the rows."""
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Tokens of the line (S,) and all their places in the rows (S, m), for each number m of places."""

    @classmethod
    def of(cls, to_rows: np.ndarray, tokens: int, device: torch.device) -> SharedPrompts:
        """For a line of `tokens` tokens, each of which is in a row at least once. Token 0 is in two:

        >>> shared = SharedPrompts.of(np.array([0, 1, 0, 2]), 3, torch.device("cpu"))
        >>> shared.copies[1][1].tolist()
        [[0, 2]]
        """
        order = np.argsort(to_rows, kind="stable")
        counts = np.bincount(to_rows, minlength=tokens)
        firsts = np.cumsum(counts) - counts
        copies = []
        for m in np.unique(counts).tolist():
            chosen = np.flatnonzero(counts == m)
            places = order[firsts[chosen][:, None] + np.arange(m)]
            copies.append((torch.from_numpy(chosen).to(device), torch.from_numpy(places).to(device)))
        to_line = torch.from_numpy(order[firsts]).to(device)
        return cls(torch.from_numpy(to_rows).to(device), to_line, tuple(copies))


class TokenExchange(Protocol):
    """Sequence parallelism: each of U ranks holds a slice of S tokens of the line, and attention needs whole
    rows."""

    def to_heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """From (S, h, d) tensors of this rank's tokens to (N, h / U, d) tensors: all tokens of the line, and
        this rank's share of the heads of queries with the heads of keys and values that they need."""

    def to_tokens(self, out: torch.Tensor) -> torch.Tensor:
        """From (N, h / U, d), the result for this rank's heads, to (S, h, d)."""


@dataclass(frozen=True)
class RowPlan:
    """How packed rows are attended to; built once per forward pass, used by every layer. "Packed" is one row
    after the other."""

    groups: tuple[RowGroup, ...]
    """Blocks of the padded line, in order."""
    to_padded: torch.Tensor | None
    """(padded tokens,) packed position of each padded one; padding repeats its row's last token. None: both
    lines are the same."""
    to_packed: torch.Tensor | None
    """(N,) padded position of each packed token."""
    boundaries: torch.Tensor
    """(B + 1,) int32, row starts, and N (cu_seqlens)."""
    longest: int
    """Tokens of the longest row."""
    shared: SharedPrompts | None = None
    """How the line expands into rows if several rows share a prompt; None: the line is the rows."""
    exchange: TokenExchange | None = None
    """Exchanges this rank's slice of the line for all of it; None: this rank has the whole line."""
    masks: dict[tuple[int, int, torch.dtype], torch.Tensor] = field(default_factory=dict)
    """By (width, window, dtype), built on first use."""


def group_rows(lengths: np.ndarray) -> list[tuple[int, int]]:
    """Splits descending lengths into runs (first, end): padding is at most a quarter of the real tokens, and
    512 tokens more for short rows.

    >>> group_rows(np.array([2000, 1900, 700, 9, 8, 2]))
    [(0, 2), (2, 3), (3, 6)]
    """
    runs, first = [], 0
    summed = np.concatenate(([0], np.cumsum(lengths)))
    while first < len(lengths):
        real = summed[first + 1 :] - summed[first]
        padded = lengths[first] * np.arange(1, len(real) + 1)
        too_much = padded - real > real // 4 + (_FREE_PADDING if lengths[first] <= _SHORT else 0)
        count = int(too_much.argmax()) if too_much.any() else len(real)
        runs.append((first, first + count))
        first += count
    return runs


def plan_rows(lengths: np.ndarray, device: torch.device, shared: SharedPrompts | None = None) -> RowPlan:
    """The plan for rows of these lengths, in order: (B,) integers, at least 1."""
    starts = np.concatenate(([0], np.cumsum(lengths)))
    boundaries = torch.from_numpy(starts.astype(np.int32)).to(device)
    longest, total = int(lengths.max()), int(starts[-1])
    if bool((lengths == longest).all()):
        return RowPlan((RowGroup(0, tuple(lengths.tolist())),), None, None, boundaries, longest, shared)
    order = np.argsort(-lengths, kind="stable")
    groups, gathers, scatter, at = [], [], np.empty(total, np.int64), 0
    for first, end in group_rows(lengths[order]):
        rows = order[first:end]
        width = int(lengths[rows[0]])
        column = np.arange(width)
        gather = starts[rows][:, None] + np.minimum(column, lengths[rows][:, None] - 1)
        real = column < lengths[rows][:, None]
        scatter[gather[real]] = at + np.flatnonzero(real)
        groups.append(RowGroup(at, tuple(lengths[rows].tolist())))
        gathers.append(gather.reshape(-1))
        at += gather.size
    to_padded = torch.from_numpy(np.concatenate(gathers)).to(device)
    to_packed = torch.from_numpy(scatter).to(device)
    return RowPlan(tuple(groups), to_padded, to_packed, boundaries, longest, shared)


def register_attention() -> None:
    """Makes `attn_implementation=NAME` known to transformers in this process. No mask function is registered
    with it, so transformers builds no mask and does not try to detect packing."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    row_plan: RowPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: (1, h, N, d) each (fewer heads of keys) to (1, N, h, d), with an
    exchange for the S tokens of this rank's slice. ValueError for models that take the padded path."""
    if others.get("softcap") is not None or others.get("s_aux") is not None:
        raise ValueError("its attention scores are capped, or have sinks")
    own = getattr(module, "config", None), getattr(module, "layer_idx", None)
    if sliding_window is None and window_of(*own) is not None:
        raise ValueError("its attention has a window only in its mask, which packed rows do not have")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # the gradient of x[0] would copy
    return attend_line(q, k, v, row_plan, scaling, sliding_window)[None], None


def attend_line(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: RowPlan, scale: float | None, window: int | None
) -> torch.Tensor:
    """Attention over (N, h, d) tensors, N the tokens of the line, or of this rank's slice with an exchange.
    Returns (N, h, d)."""
    if (exchange := plan.exchange) is None:
        return attend_rows(q, k, v, plan, scale, window)
    return exchange.to_tokens(attend_rows(*exchange.to_heads(q, k, v), plan, scale, window))


def attend_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: RowPlan, scale: float | None, window: int | None
) -> torch.Tensor:
    """Attention over (N, h, d) tensors, N the tokens of the line. Returns (N, h, d). The tensors' device and
    dtype determine the kernel."""
    if plan.shared is not None:
        q, k, v = (_Expand.apply(x, plan.shared) for x in (q, k, v))
    varlen = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] == v.shape[-1]
    out = (_varlen if varlen else _grouped)(q, k, v, plan, scale, window)
    return out if plan.shared is None else _Pick.apply(out, plan.shared.to_line)


@cache
def flash_kernel() -> Callable[..., torch.Tensor] | None:
    """flash-attn's kernel for packed rows; None where it is not installed, or was built for another torch."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        from flash_attn import flash_attn_varlen_func
    except (ImportError, OSError) as error:
        _log.warning("flash-attn cannot be imported, so torch's own kernels are used: %s", error)
        return None
    return flash_attn_varlen_func


def _varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: RowPlan, scale: float | None, window: int | None
) -> torch.Tensor:
    """flash-attn's kernel, or else torch's. Both sum gradients in a fixed order; by default two passes over
    the same rows differ in the last bits, so a resumed run would differ from an uninterrupted one."""
    if (flash := flash_kernel()) is not None:
        span = (window - 1, 0) if window else (-1, -1)
        bounds = (plan.boundaries, plan.boundaries, plan.longest, plan.longest)
        more: dict[str, Any] = dict(causal=True, window_size=span, deterministic=True)
        return flash(q, k, v, *bounds, softmax_scale=scale, **more)
    return _Varlen.apply(q.contiguous(), k.contiguous(), v.contiguous(), plan, scale, window)


class _Varlen(torch.autograd.Function):
    """torch's kernel for packed rows, called as `torch.nn.attention.varlen` does. That function has no option
    for a fixed order, and goes through several Python operators."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: RowPlan,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        bounds = (plan.boundaries, plan.boundaries, plan.longest, plan.longest)
        left, right = (window - 1, 0) if window else (-1, 0)
        ctx.how = dict(scale=scale, window_size_left=left, window_size_right=right)
        out, sums, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *bounds, 0.0, window is None, False, **ctx.how
        )
        ctx.save_for_backward(q, k, v, out, sums, state, unused)
        ctx.bounds, ctx.causal = bounds, window is None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, sums, state, unused = ctx.saved_tensors
        with in_fixed_order():
            given = (grads[0].contiguous(), q, k, v, out, sums, *ctx.bounds, 0.0, ctx.causal, state, unused)
            found = torch.ops.aten._flash_attention_backward(*given, **ctx.how)
        return (*found, None, None, None)


def _grouped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: RowPlan, scale: float | None, window: int | None
) -> torch.Tensor:
    if plan.to_padded is not None:
        q, k, v = (_Spread.apply(x, plan.to_padded, plan.to_packed) for x in (q, k, v))
    blocks = [_attend_group(q, k, v, group, plan, scale, window) for group in plan.groups]
    out = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    return out if plan.to_packed is None else _Pick.apply(out, plan.to_packed)


def _attend_group(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: RowGroup,
    plan: RowPlan,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """One call for one block: (rows * width, h, d)."""

    def block(x: torch.Tensor) -> torch.Tensor:  # (rows, h, width, d)
        part = x.narrow(0, group.start, group.rows * group.width)
        return part.view(group.rows, group.width, *x.shape[1:]).transpose(1, 2)

    span = window if window is not None and group.width > window else None
    queries, keys, values = (block(x) for x in (q, k, v))
    if products.are_faster(queries):
        mask = _mask(plan, group.width, span or group.width, q.device, torch.float32)
        scale = scale or q.shape[-1] ** -0.5
        out = products.AttendByProducts.apply(queries, keys, values, scale, mask, group.lengths, span)
    else:
        out = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=None if span is None else _mask(plan, group.width, span, q.device, torch.bool),
            is_causal=span is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    return out.transpose(1, 2).reshape(group.rows * group.width, q.shape[1], v.shape[2])


def _mask(plan: RowPlan, width: int, window: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """(width, width): a token sees itself and the window - 1 before it. Boolean: True where it sees. Other
    dtypes: 0 there, -inf elsewhere."""
    if (key := (width, window, dtype)) not in plan.masks:
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        seen = causal.triu(1 - window)
        added = torch.zeros(width, width, dtype=dtype, device=device)
        plan.masks[key] = seen if dtype == torch.bool else added.masked_fill_(~seen, -torch.inf)
    return plan.masks[key]


class _Spread(torch.autograd.Function):
    """Packed to padded. Padding has no gradient, so the backward pass is a gather too, not a slow
    scatter-add."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, to_padded: torch.Tensor, to_packed: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(to_packed)
        return x.index_select(0, to_padded)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (to_packed,) = ctx.saved_tensors
        return grads[0].index_select(0, to_packed), None, None


class _Expand(torch.autograd.Function):
    """Line to rows. A token's gradient is the sum over its places, added up in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shared: SharedPrompts) -> torch.Tensor:
        ctx.shared = shared
        ctx.size = x.shape[0]
        return x.index_select(0, shared.to_rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0]
        summed = grad.new_empty(ctx.size, *grad.shape[1:])
        for tokens, places in ctx.shared.copies:
            of_places = grad.index_select(0, places.view(-1)).view(*places.shape, *grad.shape[1:])
            summed.index_copy_(0, tokens, of_places.sum(1) if places.shape[1] > 1 else of_places[:, 0])
        return summed, None


class _Pick(torch.autograd.Function):
    """Chooses distinct entries of the first dimension; those not chosen get a zero gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(chosen)
        ctx.size = x.shape[0]
        return x.index_select(0, chosen)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (chosen,) = ctx.saved_tensors
        grad = grads[0]
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(0, chosen, grad), None


def pick(x: torch.Tensor, chosen: torch.Tensor, *, distinct: bool) -> torch.Tensor:
    """`x[chosen]`; for `distinct` indices (K,) with a backward pass that copies instead of adding."""
    return _Pick.apply(x, chosen) if distinct else x[chosen]
