"""Holds a real batch to the table of columns in protocol/fields.py."""

from __future__ import annotations

import numpy as np
import torch

from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.fields import FIELDS


def assert_as_documented(batch: DataProto) -> None:
    """Every column is in the table, with the type and shape that it has."""
    wrong = {
        name: kind_of(column)
        for name, column in batch.items()
        if name not in FIELDS or kind_of(column) != reported(name)
    }
    assert not wrong, f"not as in protocol/fields.py: {wrong}"


def reported(name: str) -> str:
    """The table's word on a column, without the letters of its shape that no tensor shows."""
    return FIELDS[name].kind.replace("(B, P)", "(B, j)").replace("(B, R)", "(B, j)")


def kind_of(column: torch.Tensor | np.ndarray) -> str:
    """In the words of the table."""
    if isinstance(column, np.ndarray):
        return " or ".join(sorted({type(item).__name__ for item in column})) + " per row"
    dtype = str(column.dtype).removeprefix("torch.")
    if ragged.is_ragged(column):
        return f"ragged {dtype} (B, j)"
    if column.ndim == 2:
        return f"{dtype} (B, K)"
    return f"{dtype} (B,)" if column.ndim == 1 else f"{dtype} with {column.ndim} dimensions"
