"""What ranks do in the tests of fused norms; in a file of its own so that spawned processes can import it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch
from engine import megatron_jobs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig

from hydraflow.engine.megatron import matrices
from hydraflow.engine.megatron.matrices import Matrices
from hydraflow.models.norms import rms_norm


class NormedColumn(ColumnParallelLinear):
    """Normalises its input first; the norm's weight has the name that it has in Transformer Engine."""

    made = 0

    def __init__(self, inputs: int, outputs: int, *, config: TransformerConfig, **others: Any):
        super().__init__(inputs, outputs, config=config, **others)
        NormedColumn.made += 1
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(inputs, dtype=config.params_dtype))
        marked: Any = self.layer_norm_weight
        marked.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        normed = rms_norm(x, self.layer_norm_weight, self.config.layernorm_epsilon)
        return super().forward(normed, *others)


FUSED = Matrices(IdentityOp, NormedColumn, ColumnParallelLinear, RowParallelLinear)


def numbers(path: str, options: Mapping[str, Any], *, fused: bool) -> dict[str, Any]:
    """Of a model with norms that are layers, or parts of the matrices behind them."""
    NormedColumn.made = 0
    with patch.object(matrices, "LOCAL", FUSED if fused else matrices.LOCAL):
        return {**megatron_jobs.numbers(path, options, "usual", 2), "normed": NormedColumn.made}
