"""Chooses the classes of tensor-parallel matrices, Transformer Engine's or Megatron-Core's, and of the norms
between them.

In: Megatron-Core's configuration. Out: `Matrices`, from which `layers.py` and `experts.py` build layers.
Transformer Engine fuses a norm into the matrix after it, so these norms have other names (`names.py`). Left
out on purpose: its attention, in which rows cannot share a prompt; its norms and grouped matrices; latent
attention (`latent.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from hydraflow.device import gpu_count
from hydraflow.models.norms import rms_norm


class RMSNorm(nn.Module):
    """RMSNorm for sequence parallelism: each rank has a share of the tokens, so the weight is marked for a
    gradient sum over ranks. torch's class does not mark it, and Megatron-Core's needs Transformer Engine."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **others: Any):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        marked: Any = self.weight
        marked.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden), normalised over the last dimension in float32."""
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True)
class Matrices:
    """Classes with Megatron-Core's arguments."""

    norm: type[nn.Module]
    """Applied before `after_norm`."""
    after_norm: type[nn.Module]
    """Column-parallel, for the first matrix after a norm."""
    column: type[nn.Module]
    """Column-parallel."""
    row: type[nn.Module]
    """Row-parallel."""


LOCAL = Matrices(RMSNorm, ColumnParallelLinear, ColumnParallelLinear, RowParallelLinear)


def matrices(config: TransformerConfig) -> Matrices:
    """Transformer Engine's classes for bfloat16 on CUDA, unless `transformer_impl` is local; otherwise
    Megatron-Core's, because Transformer Engine multiplies float32 matrices in TF32."""
    wanted = config.transformer_impl == "transformer_engine" and config.params_dtype == torch.bfloat16
    if not wanted or not gpu_count():
        return LOCAL
    from megatron.core.extensions import transformer_engine as te

    if not te.HAVE_TE:
        return LOCAL
    return Matrices(
        IdentityOp, te.TELayerNormColumnParallelLinear, te.TEColumnParallelLinear, te.TERowParallelLinear
    )
