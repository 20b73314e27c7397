"""GPU kernels in Triton: RMSNorm, rotary embeddings, SwiGLU, and log-probabilities and entropies from logits.

In: tensors with a row for each token, in float32 or 16 bits. Out: the results of the plain operations of
`norms.py`, `rotary.py`, `gated.py` and `fused_head.py`, except for the last bits; each takes one pass over
memory instead of five to ten. Sums have a fixed order, so the same rows give the same bits. Triton comes with
torch builds for GPUs; `gpu_kernels.py` decides when these kernels are used. Left out on purpose: attention
and matrix products, which torch's own kernels compute, and float64.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_TILE = 4096
"""Numbers that a program of `rms_norm` or `swiglu` holds in registers at a time."""
_PARTS = 512
"""Maximum number of programs that sum the gradient of a norm's weight; the number determines its bits."""
_VOCABULARY = 8192
"""Logits of a token that a program reads at a time."""


def try_out(device: str | torch.device) -> None:
    """Runs one kernel, which Triton compiles at its first call. Errors of Triton, its compiler or a driver
    propagate."""
    swiglu(*torch.ones(2, 1, device=device))


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`norms.rms_norm`: (..., H) to (..., H)."""
    return _Norm.apply(x, weight, epsilon)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, backward: bool) -> Tensor:
    """`rotary.rotate`: (B, T, h, d) rotated by cos and sin (B T, 1, d); `backward`: as there."""
    rows = x.flatten(0, 1)  # (B T, h, d)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count, heads, width = rows.shape
    assert width % 2 == 0 and cos.numel() == sin.numel() == count * width
    block, half = triton.next_power_of_2(heads), triton.next_power_of_2(width // 2)
    if out.numel():
        _rotation[count,](
            rows,
            cos.contiguous(),
            sin.contiguous(),
            out,
            rows.stride(0),
            rows.stride(1),
            heads,
            width // 2,
            BACKWARD=backward,
            HEADS=block,
            HALF=half,
            num_warps=4 if block * half < _TILE else _warps(block * half),
        )
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, (..., I) each."""
    return _Gate.apply(gate, up)


def score(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of (k, V) logits: the log-probabilities of `targets` (k,), the entropies and the logsumexps, float32
    (k,) each."""
    found = [torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(3)]
    if len(logits):
        width, targets = logits.shape[1], targets.contiguous()
        _score[len(logits),](
            logits, targets, *found, logits.stride(0), width, temperature, BLOCK=_VOCABULARY, num_warps=16
        )
    return found[0], found[1], found[2]


def score_gradient(
    logits: Tensor,
    targets: Tensor,
    scored: tuple[Tensor, Tensor],
    of_log_probs: Tensor,
    of_entropies: Tensor | None,
    temperature: float,
    out: Tensor,
) -> Tensor:
    """The gradient of (k, V) logits, written to `out`, which may be `logits`. scored: entropies and
    logsumexps, as `score` returns them. See `fused_head.FusedHead` for the formula."""
    if len(logits):
        entropies, sums = scored
        width = logits.shape[1]
        _score_gradient[len(logits), triton.cdiv(width, _TILE)](
            logits,
            targets.contiguous(),
            entropies,
            sums,
            of_log_probs,
            of_log_probs if of_entropies is None else of_entropies,
            out,
            logits.stride(0),
            out.stride(0),
            width,
            temperature,
            ENTROPY=of_entropies is not None,
            BLOCK=_TILE,
            num_warps=8,
        )
    return out


class _Norm(torch.autograd.Function):
    """Keeps x and 1 / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rows, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        width, weight = x.shape[-1], weight.contiguous()
        assert weight.shape == (width,)
        count = rows.numel() // width
        scale = torch.empty(count, dtype=torch.float32, device=x.device)
        block, tile = _tile(width)
        how = dict(ROWS=tile, BLOCK=block, num_warps=_warps(block))
        if count:
            _norm[triton.cdiv(count, tile),](rows, weight, out, scale, count, width, epsilon, **how)
        ctx.save_for_backward(rows, scale, weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        rows, scale, weight = ctx.saved_tensors
        grad, out, width = grads[0].contiguous(), torch.empty_like(rows), rows.shape[-1]
        block, tile = _tile(width)
        parts, trained = min(_PARTS, triton.cdiv(len(scale), tile)), ctx.needs_input_grad[1]
        of_weight = torch.empty(parts if trained else 0, width, dtype=torch.float32, device=rows.device)
        if parts:
            _norm_gradient[parts,](
                grad,
                rows,
                weight,
                scale,
                out,
                of_weight,
                len(scale),
                width,
                TRAINED=trained,
                ROWS=tile,
                BLOCK=block,
                num_warps=_warps(block),
            )
        return out, of_weight.sum(0).to(weight.dtype) if trained else None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        assert gate.shape == up.shape
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        if out.numel():
            _gate[triton.cdiv(out.numel(), _TILE),](gate, up, out, out.numel(), BLOCK=_TILE, num_warps=8)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        if (count := gate.numel()) > 0:
            _gate_gradient[triton.cdiv(count, _TILE),](
                grads[0].contiguous(), gate, up, of_gate, of_up, count, BLOCK=_TILE, num_warps=8
            )
        return of_gate, of_up


def _tile(width: int) -> tuple[int, int]:
    """Padded width of a row, and rows to a tile."""
    block = triton.next_power_of_2(width)
    return block, max(1, _TILE // block)


def _warps(numbers: int) -> int:
    """Warps of a program with this many numbers, at least a tile, in registers."""
    return 8 if numbers <= 2 * _TILE else 16


@triton.jit
def _norm(
    X: tl.tensor,
    W: tl.tensor,
    OUT: tl.tensor,
    SCALE: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    epsilon: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < count)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / width + epsilon)
    normed = (x * scale[:, None]).to(OUT.dtype.element_ty).to(tl.float32)
    weight = tl.load(W + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(OUT + at, (normed * weight[None, :]).to(OUT.dtype.element_ty), mask=inside)
    tl.store(SCALE + row, scale, mask=row < count)


@triton.jit
def _norm_gradient(
    GRAD: tl.tensor,
    X: tl.tensor,
    W: tl.tensor,
    SCALE: tl.tensor,
    OUT: tl.tensor,
    OF_WEIGHT: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    TRAINED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    part = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    weight = tl.load(W + column, mask=column < width, other=0.0).to(tl.float32)
    of_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(part * ROWS, count, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (column < width)[None, :]
        at = row[:, None] * width + column[None, :]
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(GRAD + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(SCALE + row, mask=row < count, other=0.0)
        normed = x * scale[:, None]
        wide = grad * weight[None, :]
        mean = tl.sum(wide * normed, 1) / width
        found = (wide - normed * mean[:, None]) * scale[:, None]
        tl.store(OUT + at, found.to(OUT.dtype.element_ty), mask=inside)
        if TRAINED:
            of_weight += tl.sum(grad * normed, 0)
    if TRAINED:
        tl.store(OF_WEIGHT + part * width + column, of_weight, mask=column < width)


@triton.jit
def _rotation(
    X: tl.tensor,
    COS: tl.tensor,
    SIN: tl.tensor,
    OUT: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    heads: tl.tensor,
    half: tl.tensor,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS), tl.arange(0, HALF)
    inside = (head < heads)[:, None] & (column < half)[None, :]
    at = row * row_stride + head[:, None].to(tl.int64) * head_stride + column[None, :]
    first = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(X + at + half, mask=inside, other=0.0).to(tl.float32)
    of_row = row * 2 * half + column
    cos1 = tl.load(COS + of_row, mask=column < half, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(COS + of_row + half, mask=column < half, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(SIN + of_row, mask=column < half, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(SIN + of_row + half, mask=column < half, other=0.0).to(tl.float32)[None, :]
    if BACKWARD:
        of_first, of_second = first * cos1 + second * sin2, second * cos2 - first * sin1
    else:
        of_first, of_second = first * cos1 - second * sin1, second * cos2 + first * sin2
    to = (row * heads + head[:, None]) * 2 * half + column[None, :]
    tl.store(OUT + to, of_first.to(OUT.dtype.element_ty), mask=inside)
    tl.store(OUT + to + half, of_second.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _gate(
    GATE: tl.tensor,
    UP: tl.tensor,
    OUT: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(GATE + at, mask=at < count, other=0.0).to(tl.float32)
    up = tl.load(UP + at, mask=at < count, other=0.0).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(OUT.dtype.element_ty).to(tl.float32)
    tl.store(OUT + at, (silu * up).to(OUT.dtype.element_ty), mask=at < count)


@triton.jit
def _gate_gradient(
    GRAD: tl.tensor,
    GATE: tl.tensor,
    UP: tl.tensor,
    OF_GATE: tl.tensor,
    OF_UP: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(GRAD + at, mask=at < count, other=0.0).to(tl.float32)
    gate = tl.load(GATE + at, mask=at < count, other=0.0).to(tl.float32)
    up = tl.load(UP + at, mask=at < count, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    of_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(OF_GATE + at, of_gate.to(OF_GATE.dtype.element_ty), mask=at < count)
    tl.store(OF_UP + at, (grad * gate * sigmoid).to(OF_UP.dtype.element_ty), mask=at < count)


@triton.jit
def _score(
    LOGITS: tl.tensor,
    TARGETS: tl.tensor,
    LOG_PROBS: tl.tensor,
    ENTROPIES: tl.tensor,
    SUMS: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    temperature: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    # `weighted` sums share * (logit - largest): with plain logits, small entropies would cancel out
    largest, total, weighted = -1e38, 0.0, 0.0
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < width
        logits = tl.load(LOGITS + row * stride + column, mask=inside, other=-float("inf")).to(tl.float32)
        logits = logits / temperature
        new = tl.maximum(largest, tl.max(logits, 0))
        shares = tl.exp(logits - new)
        shrink = tl.exp(largest - new)
        weighted = (weighted + total * (largest - new)) * shrink
        weighted += tl.sum(tl.where(shares > 0, shares * (logits - new), 0.0), 0)
        total = total * shrink + tl.sum(shares, 0)
        largest = new
    target = tl.load(TARGETS + row)
    own = tl.load(LOGITS + row * stride + target).to(tl.float32) / temperature
    tl.store(LOG_PROBS + row, own - largest - tl.log(total))
    tl.store(ENTROPIES + row, tl.log(total) - weighted / total)
    tl.store(SUMS + row, largest + tl.log(total))


@triton.jit
def _score_gradient(
    LOGITS: tl.tensor,
    TARGETS: tl.tensor,
    ENTROPIES: tl.tensor,
    SUMS: tl.tensor,
    OF_LOG_PROBS: tl.tensor,
    OF_ENTROPIES: tl.tensor,
    OUT: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
    width: tl.tensor,
    temperature: tl.tensor,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    logits = tl.load(LOGITS + row * stride + column, mask=inside, other=0.0).to(tl.float32) / temperature
    log_probs = logits - tl.load(SUMS + row)
    probs = tl.exp(log_probs)
    of_log_prob = tl.load(OF_LOG_PROBS + row)
    found = of_log_prob * (tl.where(column == tl.load(TARGETS + row), 1.0, 0.0) - probs)
    if ENTROPY:
        found -= tl.load(OF_ENTROPIES + row) * probs * (log_probs + tl.load(ENTROPIES + row))
    tl.store(OUT + row * out_stride + column, (found / temperature).to(OUT.dtype.element_ty), mask=inside)
