"""Atomic writes, and a test in advance whether a file can be written.

In: a path. Out: a name beside it to write to, or OSError. Standard library only. Left out on purpose: fsync,
which checkpoints need (`trainer/checkpoint_store.py`), and messages to the user.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name in the folder of `path`, unique to this process, which is renamed to `path` if the
    block succeeds, else removed.

    OSError if it cannot be renamed.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        with suppress(OSError):
            unfinished.unlink()


def replace_folder(finished: Path, target: Path) -> None:
    """Renames a finished folder to `target`, replacing what was there."""
    old = target.with_name(f"{target.name}.old.unfinished")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    finished.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def prove_writable(folder: Path) -> None:
    """Raises OSError if the folder cannot be created or written to; leaves nothing behind."""
    existing = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    with tempfile.TemporaryFile(dir=existing):
        pass
