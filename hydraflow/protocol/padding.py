"""Rows added so that a batch divides over ranks, and taken away again. For calls that only compute; training
is never padded.

In: a batch (`DataProto`; a `RemoteBatch` has `pad_to_divisor` itself). Out: a longer batch and the number of
rows added, and back. Left out on purpose: padding of tokens, which `ragged.to_padded` does inside a worker.
"""

from __future__ import annotations

import numpy as np

from hydraflow.protocol.batch import DataProto


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """The batch followed by its own rows, from the start and around again, until `size_divisor` divides; and
    how many were added.

    The batch itself when nothing is to add (an empty batch included). ValueError for a divisor below 1.

    >>> import torch
    >>> padded, pad_size = pad_dataproto_to_divisor(DataProto.from_dict({"x": torch.arange(3)}), 4)
    >>> padded.get("x").tolist(), pad_size
    ([0, 1, 2, 0], 1)
    """
    if size_divisor < 1:
        raise ValueError(f"size_divisor is {size_divisor}; it must be at least 1")
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data, 0
    return data.select_idxs(np.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """The batch without its last `pad_size` rows, as views. ValueError when it has fewer."""
    if not 0 <= pad_size <= len(data):
        raise ValueError(f"{pad_size} rows of padding cannot be taken from a batch of {len(data)} rows")
    return data if pad_size == 0 else data.slice(0, len(data) - pad_size)
