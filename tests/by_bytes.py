"""Objects with tensors as bytes, to be sent to another process of a test.

torch.multiprocessing puts each tensor into shared memory of its own, which the reader asks for over a
connection, and pickle has torch write a file in memory for each: for small ones that takes ten times as
long as a copy.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


class Packer(pickle.Pickler):
    """Writes plain tensors as bytes."""

    def reducer_override(self, value: object) -> Any:
        if type(value) is not torch.Tensor or value.is_meta or value.requires_grad:
            return NotImplemented
        numbers = value.contiguous().view(-1).view(torch.uint8)
        return unpacked, (bytearray(numbers.numpy()), value.dtype, value.shape)


def packed(value: object) -> bytes:
    """Tensors in it are copied."""
    file = io.BytesIO()
    Packer(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def unpacked(data: bytearray, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """A tensor of these bytes."""
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
