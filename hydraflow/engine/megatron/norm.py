"""RMSNorm under sequence parallelism.

In: hidden states of a rank's tokens. Out: the same, normalised. Megatron-Core has it from Transformer Engine.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from hydraflow.models.norms import rms_norm


class RMSNorm(nn.Module):
    """With sequence parallelism each rank has a share of the tokens, so the weight is marked for a gradient
    sum over ranks, which torch's class does not do."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **others: Any):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        marked: Any = self.weight
        marked.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden), normalised over the last dimension in float32."""
        return rms_norm(x, self.weight, self.eps)
