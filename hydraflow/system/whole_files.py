"""Files that are there whole or not at all, and whether one could be written before there is something to
write.

In: a path. Out: a name beside it to write to, or OSError. Standard library only. Left out on purpose: having
the disk confirm what was written, which checkpoints need (`trainer/checkpoint_store.py`), and what to tell
the user when it cannot.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name in the folder of `path`, no other process's, which is renamed to `path` when the block ends well
    and removed when not.

    OSError when it cannot be renamed.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        with suppress(OSError):
            unfinished.unlink()


def prove_writable(folder: Path) -> None:
    """OSError when nothing could be written to a folder, or it could not be made; leaves nothing behind."""
    existing = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    with tempfile.TemporaryFile(dir=existing):
        pass
