"""How Megatron-Core's layers learn about packed rows (`models/packing.py`).

In: the plan of a line. Out: what Megatron-Core passes to every layer of a model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from hydraflow.engine.megatron.balance import BalancedRows
from hydraflow.models.attention import RowPlan
from hydraflow.models.routing import LineRoutes


@dataclass
class PackedLine(PackedSeqParams):
    """Megatron-Core's own fields stay empty."""

    plan: RowPlan | None = None
    positions: torch.Tensor | None = None
    """(N,) place of each token in its row."""
    routes: LineRoutes | None = None
    """Experts of its tokens, where they are recorded or given."""
    rows_with: torch.Tensor | None = None
    """(n,) how many trained rows have each of this rank's tokens, for what counts tokens: of what fills up
    none, of a shared prompt several."""
    balanced: BalancedRows | None = None
    """Rows over whose tokens experts are to be spread evenly."""
