"""Writes one rank's part of a checkpoint, in the background if asked, and reports the outcome in small files.

In: a snapshot. Out: files under `<checkpoint>/<role>/`, and in `<checkpoint>/parts/` what was written:
`<role>-<rank>.json` with sizes and checksums, or with the error. A `.pending` file is created at the start
and removed at the end, whatever happens: on a full disk files can be removed when none can be written. Files
rather than calls, because a worker runs one method at a time and is busy with the next step by then. Left out
on purpose: manifest, names, pointer (`trainer/checkpoint_store.py`).
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydraflow.engine.base import Snapshot
from hydraflow.system.whole_files import replacing

logger = logging.getLogger(__name__)

PARTS = "parts"
CHUNK = 16 * 2**20


@dataclass(frozen=True)
class FileInfo:
    """Size and checksum of a complete file."""

    bytes: int
    crc32: str
    """Eight hexadecimal digits."""


@dataclass(frozen=True)
class RankFiles:
    """The files that one rank has written, or the error that stopped it."""

    files: Mapping[str, FileInfo]
    """By path within the checkpoint."""
    error: str = ""
    """The error; empty on success."""


def file_facts(path: Path, *, flush: bool = False) -> FileInfo:
    """Size and checksum of a file; `flush` writes it to disk first (fsync)."""
    size = checksum = 0
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        while chunk := file.read(CHUNK):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return FileInfo(size, f"{checksum:08x}")


def expect_part(checkpoint: Path, role: str, rank: int) -> None:
    """Prepares for a rank's part: its role's folder and the `.pending` file."""
    (checkpoint / role).mkdir(exist_ok=True)
    (checkpoint / PARTS).mkdir(exist_ok=True)
    _pending(checkpoint, role, rank).touch()


def read_part(checkpoint: Path, role: str, rank: int) -> RankFiles | None:
    """What a rank has written; None while it is writing.

    OSError or ValueError when its report cannot be read, or is missing though the rank has ended: on a
    network file system either may be transient.
    """
    pending = _pending(checkpoint, role, rank).exists()  # first: it is removed after the report is written
    report = _report(checkpoint, role, rank)
    if report.exists():
        return _parsed(json.loads(report.read_text()))
    if not pending:
        raise FileNotFoundError("it left no report of success or failure; see its log")
    return None


def _parsed(report: Any) -> RankFiles:
    try:
        return RankFiles(
            {name: FileInfo(**facts) for name, facts in report["files"].items()}, report["error"]
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its report is not valid: {str(report)[:100]}") from error


def save_part(snapshot: Snapshot, checkpoint: Path, role: str, rank: int, *, background: bool) -> None:
    """Writes the snapshot, in this thread or in the process's writer thread; never raises."""
    if background:
        _writer().submit(_save, snapshot, checkpoint, role, rank)
    else:
        _save(snapshot, checkpoint, role, rank)


@cache
def _writer() -> ThreadPoolExecutor:
    """One thread for all roles of the process: every rank writes their parts in the same order, as
    their collectives need."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")


def _save(snapshot: Snapshot, checkpoint: Path, role: str, rank: int) -> None:
    part = RankFiles({}, f"{role} rank {rank} ended while it wrote")
    try:
        files = snapshot.write(checkpoint / role)
        part = RankFiles({str(path.relative_to(checkpoint)): file_facts(path, flush=True) for path in files})
    except Exception as error:  # libraries raise what they like, safetensors its own for a full disk
        part = RankFiles({}, f"{role} rank {rank}: {error}")
        if checkpoint.is_dir():  # else the run ended meanwhile, and has removed it
            logger.exception("this part of %s could not be written", checkpoint)
    finally:
        _write_report(part, checkpoint, role, rank)


def _write_report(part: RankFiles, checkpoint: Path, role: str, rank: int) -> None:
    report = _report(checkpoint, role, rank)
    try:
        with replacing(report) as unfinished:
            unfinished.write_text(json.dumps(asdict(part)))
    except OSError:
        if checkpoint.is_dir():
            logger.exception("cannot write the report of this part (%s)", part.error or "the part is written")
    finally:
        _pending(checkpoint, role, rank).unlink(missing_ok=True)


def _report(checkpoint: Path, role: str, rank: int) -> Path:
    return checkpoint / PARTS / f"{role}-{rank}.json"


def _pending(checkpoint: Path, role: str, rank: int) -> Path:
    return checkpoint / PARTS / f"{role}-{rank}.pending"
