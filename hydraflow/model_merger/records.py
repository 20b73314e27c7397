"""Makes torch's weights_only reader create inert stand-ins for the types in a shard, and refuse all others.

In: stand-ins (`engine/inert.py`) and the names that they replace. Out: a reader that runs nothing of
torch.distributed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hydraflow.engine.inert import InertRecord


class ShardedTensor(torch.Tensor):
    """A rank's part of a tensor: shape and type of the whole, the part itself, and how the whole was cut."""

    _local_tensor: torch.Tensor
    _spec: InertRecord

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Nothing can be computed with it."""
        raise AssertionError(f"{func} on a tensor that is only described")


@contextmanager
def only(types: Sequence[Any]) -> Iterator[None]:
    """Lets weights_only create these types, given as (stand-in, full name), and not those that imported
    libraries have allowed."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(list(types))
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)
