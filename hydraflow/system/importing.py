"""Imports without garbage collection.

torch, transformers and Ray create a million objects on import, and nearly all of them stay. Garbage
collection meanwhile takes a sixth of the startup time. Standard library only.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Imports inside the block are not interrupted by garbage collection. If it has imported something,
    objects that exist at its end are never examined again (`gc.freeze`); they are still freed with their last
    reference."""
    collected, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:  # else what is garbage by now would stay for good
            gc.freeze()
        if collected:
            gc.enable()
