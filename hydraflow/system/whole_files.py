"""Atomic writes, tests whether a path can be written, and JSON files that may be missing.

In: a path. Out: a name beside it to write to, or OSError. Standard library only. Left out on purpose:
messages to the user.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name in the folder of `path`, unique to this process, which is renamed to `path` if the
    block succeeds, else removed.

    Raises OSError if it cannot be renamed.
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


def make_earlier(folder: Path) -> Path:
    """Makes the first of earlier-1/, earlier-2/, ... that does not exist in the folder, for files of an
    earlier run."""
    aside = next(path for number in count(1) if not (path := folder / f"earlier-{number}").exists())
    aside.mkdir()
    return aside


def prove_writable(folder: Path) -> None:
    """Raises OSError if the folder cannot be created or written to; leaves nothing behind."""
    if folder.is_symlink() and not folder.exists():
        raise FileNotFoundError(errno.ENOENT, f"it is a link to {folder.readlink()}, which does not exist")
    existing = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    with tempfile.TemporaryFile(dir=existing):
        pass


def json_object(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if it cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def flush(path: Path) -> None:
    """Flushes a file, or a folder's entries, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
