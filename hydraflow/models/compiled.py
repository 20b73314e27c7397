"""RMSNorm, rotary embeddings and SwiGLU as kernels that torch.compile fuses.

In: tensors with a row for each token. Out: the results of the plain operations except for the last bits,
because nothing is rounded in between. Each function is compiled at its first call, for any number of rows
above one, and again for other dtypes and for calls without gradients; torch caches compiled code on disk for
later starts. Left out on purpose: products and attention, whose kernels are as good; whether to compile
(`fsdp_config.use_torch_compile`); and which modules call these functions (`norms.py`, `rotary.py`,
`gated.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hydraflow.errors import ConfigError

KEY = "fsdp_config.use_torch_compile"
"""Within the section of a role."""


class Kernel:
    """A function compiled at its first call; the first dimension of its first `by_rows` arguments counts
    rows. ConfigError when it cannot be compiled."""

    def __init__(self, function: Callable[..., Tensor], by_rows: int):
        self.function, self.by_rows = function, by_rows
        self._compiled: Callable[..., Tensor] | None = None

    def __call__(self, *args: Any) -> Tensor:
        if _as_written:
            return self.function(*args)
        import torch._dynamo as dynamo

        if self._compiled is None:
            self._compiled = torch.compile(self.function)
        for rows in args[: self.by_rows]:
            dynamo.maybe_mark_dynamic(rows, 0)
        try:
            return self._compiled(*args)
        except dynamo.exc.TorchDynamoException as error:
            rule = f"torch.compile cannot compile {self.function.__name__}: {_reason(error)}"
            raise ConfigError.one(KEY, "true", rule, f"{KEY}=false") from error


_as_written: list[bool] = []
"""One entry for each active `as_written`, which may be nested."""


@contextmanager
def as_written() -> Iterator[None]:
    """Runs its body without compilation: kernels call the plain Python functions."""
    _as_written.append(True)
    try:
        yield
    finally:
        _as_written.pop()


def _reason(error: Exception) -> str:
    """The first line of what failed below torch.compile, and a compiler's first error."""
    lines = [line.strip() for line in str(getattr(error, "inner_exception", error)).splitlines()]
    first = next((line for line in lines if line), type(error).__name__)
    cause = next((line for line in lines if "error:" in line and line != first), "")
    return f"{first}: {cause}" if cause else first


def _rms_norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = rows.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * normed.to(rows.dtype)


def _rotated(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = rows.chunk(2, -1)
    return rows * cos + torch.cat((-second, first), -1) * sin


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


_NORM, _ROTATION = Kernel(_rms_norm, by_rows=1), Kernel(_rotated, by_rows=3)
_GATE = Kernel(_swiglu, by_rows=2)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`norms.rms_norm`, (..., H) to (..., H)."""
    return _NORM(x.flatten(0, -2), weight, epsilon).view(x.shape)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(B, T, h, d) rotated by cos and sin (B T, 1, d)."""
    return _ROTATION(x.flatten(0, 1), cos, sin).view(x.shape)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, (..., I) each."""
    return _GATE(gate.flatten(0, -2), up.flatten(0, -2)).view(gate.shape)
