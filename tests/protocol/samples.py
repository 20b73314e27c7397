"""Small batches with every kind of column, and their rows as plain Python values to compare with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto

laws = settings(deadline=None, max_examples=50)
"""How properties are tested: no time limit per example, because tests share the machine."""


def make_batch(lengths: list[int], seed: int = 0) -> DataProto:
    """One row per length: ragged int64, bfloat16 and (j, 2) float32, dense float64 (B, 2) and bool (B,), two
    object columns."""
    g = torch.Generator().manual_seed(seed)
    rows, tokens = len(lengths), sum(lengths)
    counts = torch.tensor(lengths, dtype=torch.int64)
    tensors = {
        "tokens": ragged.from_parts(torch.randint(-9, 9, (tokens,), generator=g), counts),
        "logp": ragged.from_parts(torch.randn(tokens, generator=g).bfloat16(), counts),
        "pairs": ragged.from_parts(torch.randn(tokens, 2, generator=g), counts),
        "score": torch.randn(rows, 2, generator=g, dtype=torch.float64),
        "flag": torch.rand(rows, generator=g) > 0.5,
    }
    objects = {
        "uid": [f"u{i}" for i in range(rows)],
        "info": [{"turns": [i, "ü"], "seed": seed} for i in range(rows)],
    }
    return DataProto.from_dict(tensors, objects, {"step": 3})


def rows_of(data: DataProto) -> list[dict[str, Any]]:
    """Every row as plain values."""
    plain = {key: _plain(column) for key, column in data.items()}
    return [{key: values[row] for key, values in plain.items()} for row in range(len(data))]


def _plain(column: torch.Tensor | np.ndarray) -> list[Any]:
    return (
        column.tolist() if isinstance(column, np.ndarray) else [row.tolist() for row in ragged.rows(column)]
    )


row_lengths = st.lists(st.integers(0, 5), max_size=7)
"""Lengths of the rows of a batch, empty rows and empty batches included."""

some_lengths = st.lists(st.integers(0, 5), min_size=1, max_size=7)
"""As `row_lengths`, with at least one row."""
