"""Rotary embeddings of queries and keys with a custom backward pass, replacing transformers'.

In: a model as transformers builds it. Out: the same model; its rotations are bit-identical and take half the
time on a CPU, where a few rows at a time go through all operations while they are in the cache. Gradients are
bit-identical too, but have the memory layout of queries and keys, so one of transformers' own norms before
them sums its weight's gradient in another order. On a GPU they are one kernel, and the last bits differ.
Layers are changed if the function that they call has exactly transformers' usual operations. Left out on
purpose: functions that rotate adjacent columns or only a part of each head, and trained cosines.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hydraflow.models import compiled
from hydraflow.models.chunks import chunk_slices
from hydraflow.models.gpu_kernels import kernels_for
from hydraflow.models.norms import steps_of

_NAME = "apply_rotary_pos_emb"
CACHED = 2**16
"""Numbers that are rotated at a time on a CPU."""


def replace_rotations(model: nn.Module, *, compile: bool = False) -> None:
    """Makes every layer that rotates queries and keys as usual call `rotate_both`; layers whose `forward` has
    been replaced stay as they are. `compile`: use the rotation that torch.compile fuses."""
    function = partial(rotate_both, rotated=compiled.rotated) if compile else rotate_both
    for part in model.modules():
        forward = type(part).forward
        calls = isinstance(forward, FunctionType) and _NAME in forward.__code__.co_names
        if calls and "forward" not in vars(part) and _is_usual(forward.__globals__.get(_NAME)):
            known = {**forward.__globals__, _NAME: function}
            own = FunctionType(
                forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__
            )
            own.__kwdefaults__ = forward.__kwdefaults__
            part.forward = MethodType(own, part)  # type: ignore[method-assign]


def rotate_both(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
    rotated: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries and keys (B, h, T, d), or (B, T, h, d) with `unsqueeze_dim` 2, rotated by cos and sin (B, T, d)
    or (1, T, d). `rotated`: another function for the rotation."""
    plain = unsqueeze_dim in (1, 2) and q.ndim == 4 and len(cos) in (1, len(q))
    if not plain or cos.requires_grad or not q.dtype == k.dtype == cos.dtype:
        return _as_in_transformers(q, k, cos, sin, unsqueeze_dim)
    if rotated is None:
        kernels = kernels_for(q)
        rotated = partial(Rotated.apply, rotate if kernels is None else kernels.rotate)
    cos, sin = (one[:, :, None].expand(len(q), -1, 1, -1).flatten(0, 1) for one in (cos, sin))  # (B T, 1, d)
    if unsqueeze_dim == 2:
        return rotated(q, cos, sin), rotated(k, cos, sin)
    of_q, of_k = (rotated(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))
    return of_q, of_k


class Rotated(torch.autograd.Function):
    """(B, T, h, d), cos and sin (B T, 1, d), with `rotate` or a kernel in its place."""

    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Tensor], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.kernel = kernel
        return kernel(x, cos, sin, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        return None, ctx.kernel(grads[0], *ctx.saved_tensors, backward=True), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, backward: bool) -> Tensor:
    """(B, T, h, d) rotated by cos and sin (B T, 1, d); `backward`: a gradient of that, turned back."""
    found = x.new_empty(x.shape)
    rows, out = x.flatten(0, 1), found.flatten(0, 1)  # (B T, h, d)
    half = rows.shape[-1] // 2
    size = max(1, CACHED // rows[0].numel()) if x.device.type == "cpu" and len(rows) else max(1, len(rows))
    for part in chunk_slices(len(rows), size):
        of_part = torch.mul(rows[part], cos[part], out=out[part])
        if backward:
            moved = rows[part] * sin[part]
            of_part += torch.cat((moved[..., half:], moved[..., :half].neg_()), -1)
        else:
            first, second = rows[part].split(half, -1)
            of_part += torch.cat((-second, first), -1).mul_(sin[part])
    return found


def _is_usual(function: Any) -> bool:
    half = getattr(function, "__globals__", {}).get("rotate_half")
    return (
        steps_of(function) == steps_of(_as_in_transformers)
        and function.__code__.co_varnames == _as_in_transformers.__code__.co_varnames
        and steps_of(half) == steps_of(rotate_half)
    )


def rotate_half(x: Tensor) -> Tensor:
    """A verbatim copy of transformers' function of this name, for comparing bytecode."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def _as_in_transformers(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """A verbatim copy of Llama's `apply_rotary_pos_emb`, whose bytecode is compared with that of others."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed
