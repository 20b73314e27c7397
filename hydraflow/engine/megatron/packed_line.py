"""Passes packed rows (`models/packing.py`) through Megatron-Core to its layers.

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
    """One packed line. The fields of Megatron-Core's class stay empty."""

    plan: RowPlan | None = None
    positions: torch.Tensor | None = None
    """(N,) position of each token in its row."""
    routes: LineRoutes | None = None
    """The line's experts, if they are recorded or replayed."""
    rows_with: torch.Tensor | None = None
    """(n,) number of trained rows that contain each of this rank's tokens: 0 for padding, several for a
    shared prompt."""
    balanced: BalancedRows | None = None
    """The rows of the balancing loss."""
