"""Imports without garbage collection.

torch, transformers and Ray make a million objects while they are imported, and nearly all of them stay.
Looking for garbage among them takes a sixth of the time of a start. Standard library only.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Imports inside the block are not interrupted by garbage collection, and what is there at its end is
    never looked at again (`gc.freeze`); it is still freed with its last reference."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collected:
            gc.enable()
