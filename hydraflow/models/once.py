"""Lets one process of a node at a time download a model or copy its code, which transformers does without a
lock.

In: what is being resolved. Out: a lock file on a local disk. Later processes find everything in place. Left
out on purpose: other nodes, which have their own caches (`dispatch/environment.py`), and folders without
code, which are never written.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from hydraflow.errors import EnvironmentFault
from hydraflow.models.config import ModelSourceConfig
from hydraflow.system.node_folder import make_node_folder, node_folder

SECONDS = 3600.0
"""Seconds to wait for a download by another process."""


@contextmanager
def resolving(path: str, model: ModelSourceConfig) -> Iterator[None]:
    """Holds the lock while something is read that may have to be fetched first. EnvironmentFault when another
    process holds it for an hour."""
    if os.path.isdir(path) and not model.trust_remote_code:
        yield
        return
    make_node_folder()
    lock = lock_file(path)
    lock.parent.mkdir(exist_ok=True)
    held = FileLock(lock, timeout=SECONDS)
    try:
        held.acquire()
    except Timeout:
        text = f"waited {SECONDS:g} s for another process on this node that fetches {path} (it holds {lock})"
        raise EnvironmentFault(text) from None
    try:
        yield
    finally:
        held.release()


def lock_file(path: str) -> Path:
    """Path of a model's lock file."""
    name = hashlib.sha256(str(path).encode()).hexdigest()[:16]
    return node_folder() / "locks" / f"{name}.lock"
