"""This user's folder on a disk of this machine: caches that nodes must not share, locks, Ray's sockets and
token, models' own code.

In: the folder for temporary files, TMPDIR or /tmp. Out: a folder below it that only this user can enter. Its
name is predictable, and another user who made it first could put code into it, so a folder of another user is
rejected. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from hydraflow.errors import ConfigError, EnvironmentFault

MODULES = "HF_MODULES_CACHE"
"""Variable for the folder to which transformers copies a model's own code; by default it is in the home
folder, which nodes often share."""
RAY_BASE = "RAY_TMPDIR"
"""Variable for the folder of Ray's temporary files."""
LONGEST_SOCKET = 107
"""Longest path of a Unix socket, in bytes."""
SOCKET = "/session_2026-11-22_05-35-18_170953_4194304/sockets/plasma_store.1"
"""The longest path that Ray adds below its folder."""
SESSIONS = "ray"
"""Ray makes this folder world-accessible, so its parent must be private."""
KEPT_DAYS = 14
"""Days for which the logs of a Ray that has ended are kept."""
REMOVED_AT_ONCE = 20
"""Largest number of old sessions that one run removes."""


def node_folder() -> Path:
    """Path of the user's folder, which need not exist yet."""
    return _below(Path(tempfile.gettempdir()))


def make_node_folder() -> Path:
    """Makes the folder, accessible to this user only. Raises EnvironmentFault if it belongs to another user,
    or cannot be made."""
    return own_folder_below(Path(tempfile.gettempdir()))


def own_folder_below(base: Path, variable: str = "TMPDIR") -> Path:
    """Makes the user's folder below a given folder for temporary files, which `variable` names. Raises as
    `make_node_folder` does."""
    folder = _below(base)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            folder.chmod(0o700)
            return folder
    except OSError as error:
        remedy = f"set {variable}=<a folder that you may write>"
        raise EnvironmentFault(f"{folder} cannot be made: {error.strerror}; {remedy}") from error
    remedy = f"set {variable}=<a folder of your own>"
    raise EnvironmentFault(f"{folder} is not a private folder of this user; {remedy}")


def session_folder() -> Path:
    """Where a local Ray keeps sockets, logs and spilled objects: in the user's folder below RAY_TMPDIR, else
    TMPDIR, else /tmp. If that path is too long for sockets and RAY_TMPDIR is private to the user, RAY_TMPDIR
    itself. Raises ConfigError if the path is too long.
    """
    named = os.environ.get(RAY_BASE)
    for base in [named] if named else [tempfile.gettempdir(), "/tmp"]:
        if _has_room(_below(Path(base)) / SESSIONS):
            return own_folder_below(Path(base), RAY_BASE if named else "TMPDIR") / SESSIONS
    folder = Path(str(named))
    if _has_room(folder / SESSIONS) and _is_private(folder):
        return folder / SESSIONS
    most = LONGEST_SOCKET - len(SOCKET) - len(f"/{SESSIONS}")
    private = most - len(f"/{_below(folder).name}")
    limit = f"at most {private} characters, or {most} for a folder of yours with mode 700"
    rule = f"is too long for the sockets below it: {limit}"
    raise ConfigError.one(RAY_BASE, named, rule, f"{RAY_BASE}=/tmp")


def remove_old_sessions(folder: Path) -> None:
    """Removes what Rays that ended long ago have left in the folder of sessions; Ray keeps it for good. A Ray
    that runs writes to its logs every few seconds."""
    until = time.time() - KEPT_DAYS * 24 * 3600
    for session in sorted(folder.glob("session_2*"))[:REMOVED_AT_ONCE]:  # their names begin with the date
        with suppress(OSError):  # another run removes it, too
            if max(file.stat().st_mtime for file in [session, *session.glob("logs/*")]) < until:
                shutil.rmtree(session)


def _has_room(folder: Path) -> bool:
    return len(os.fsencode(folder)) + len(SOCKET) <= LONGEST_SOCKET


def _is_private(folder: Path) -> bool:
    """Whether the folder belongs to the user, and no other user can enter it."""
    found = folder.stat() if folder.is_dir() else None
    return found is not None and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077


def _below(base: Path) -> Path:
    return base / f"hydraflow-{os.getuid()}"
