"""Imports without garbage collection.

torch, transformers and Ray create a million objects on import, and nearly all of them stay. Garbage
collection meanwhile takes a sixth of the startup time. Standard library only.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Imports inside the block are not interrupted by garbage collection. Objects that exist at its end are
    never examined again (`gc.freeze`); they are still freed with their last reference."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collected:
            gc.enable()
