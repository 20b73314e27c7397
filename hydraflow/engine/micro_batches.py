"""Splits one rank's rows into micro-batches: a fixed number of rows each, or as many as a token budget holds.

In: a `DataProto` with ragged prompts and responses. Out: micro-batches, the same number on every data rank,
and the order to restore. Left out on purpose: the sizes themselves (`batch_plan`), and moving rows between
ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hydraflow.protocol import ragged
from hydraflow.protocol.balance import token_bins
from hydraflow.protocol.batch import DataProto


@dataclass(frozen=True)
class MicroBatches:
    """Parts of a batch, and where their rows came from."""

    parts: list[DataProto]
    """At least one row each."""
    order: np.ndarray
    """(B,) row of the batch for each row of the parts, one part after the other."""

    def restore(self, rows: DataProto) -> DataProto:
        """Reorders rows from the parts' order to the batch's."""
        if bool((self.order[:-1] < self.order[1:]).all()):
            return rows
        return rows.select_idxs(np.argsort(self.order))


def row_tokens(data: DataProto) -> torch.Tensor:
    """Tokens of each row, prompt and response together: int64 (B,)."""
    return ragged.lengths(data.get("prompts")) + ragged.lengths(data.get("responses"))


def split_rows(data: DataProto, size: int) -> MicroBatches:
    """Micro-batches of `size` rows in order; the last may have fewer. Ranks with the same number of
    rows get the same number of parts."""
    assert size >= 1, size
    order = np.arange(len(data))
    if size >= len(data):
        return MicroBatches([data], order)
    return MicroBatches(
        [data.slice(first, min(first + size, len(data))) for first in range(0, len(data), size)], order
    )


def split_tokens(
    data: DataProto, max_tokens: int, reduce_max: Callable[[torch.Tensor], torch.Tensor]
) -> MicroBatches:
    """Micro-batches of at most `max_tokens` tokens each, prompts and responses together.

    `reduce_max` gives the largest value over data ranks: all get the number of parts of the rank that needs
    the most, because every forward pass is a collective. Raises ValueError for a row that is longer than the
    budget."""
    lengths = row_tokens(data).numpy()
    needed = len(token_bins(lengths, max_tokens))
    agreed = int(reduce_max(torch.tensor([float(needed)])))
    bins = token_bins(lengths, max_tokens, min_bins=agreed)
    assert len(bins) == agreed, (
        f"{len(data)} rows cannot be split into {agreed} micro-batches: ranks hold different numbers of rows"
    )
    if agreed == 1:
        return MicroBatches([data], np.arange(len(data)))
    rows = [np.sort(np.asarray(chosen)) for chosen in bins]
    return MicroBatches([data.select_idxs(chosen) for chosen in rows], np.concatenate(rows))
