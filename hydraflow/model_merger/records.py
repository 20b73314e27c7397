"""Stand-ins for the types that pickled checkpoints name: they keep what the file says and do nothing.

In: names that a file may use. Out: records with the file's values. Nothing of torch.distributed is imported or run, so files of
other versions can be read, and a name that is not on a list is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class Record:
    """What a pickle made of some type: arguments and state, by name where they have names."""

    def __new__(cls, *args: Any, **_: Any) -> Record:
        """Takes any arguments."""
        made = super().__new__(cls)
        made.args = args
        return made

    args: tuple[Any, ...]
    """What it was made with."""
    state: Any = None
    """Its state when that has no names."""

    def __setstate__(self, state: Any) -> None:
        """What pickle calls."""
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state

    def __getattr__(self, name: str) -> Any:
        """Only for what the file does not say."""
        raise AttributeError(name)


class ShardedTensor(torch.Tensor):
    """A rank's part of a tensor: shape and type of the whole, the part itself, and how the whole was cut."""

    _local_tensor: torch.Tensor
    _spec: Record

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Nothing can be computed with it."""
        raise AssertionError(f"{func} on a tensor that is only described")


@contextmanager
def only(types: Sequence[Any]) -> Iterator[None]:
    """Lets weights_only make these types, given as (stand-in, full name), and not those that imported libraries have allowed."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(list(types))
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def record_type(name: str) -> type[Record]:
    """A record type of that name."""
    return type(name, (Record,), {})
