"""Allows one run at a time in a run folder, and names its owner.

In: a folder. Out: a lock that the kernel releases when the process ends, however it ends; the file `.lock`
names its owner. Some file systems have no such lock (Lustre without `-o flock`, NFS without lockd). There
only `.lock` decides: a run starts, with a warning, unless the process that it names may still be alive; the
name is removed when the run ends. Left out on purpose: two runs that start in the same moment on such a file
system, and file systems that lock per machine (`localflock`).
"""

from __future__ import annotations

import fcntl
import getpass
import json
import logging
import os
import socket
from datetime import datetime
from pathlib import Path
from typing import Any

from hydraflow.errors import ConfigError
from hydraflow.system.processes import stat_fields
from hydraflow.system.whole_files import json_object

LOCK_FILE = ".lock"
FIELD = "trainer.default_local_dir"
"""The key that names the folder."""

logger = logging.getLogger(__name__)


class RunLock:
    """Held until `release`. Raises ConfigError, naming the owner, when another process holds it, and when
    `.lock` cannot be written."""

    def __init__(self, folder: Path):
        self._path = folder / LOCK_FILE
        self._file = -1
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            self._is_kernel_lock = self._take()
            os.truncate(self._file, 0)
            os.pwrite(self._file, json.dumps(_me()).encode(), 0)
        except ConfigError:
            self._close()
            raise
        except OSError as error:
            self._close()
            named = _in_words(_owner(folder))
            rule = f"{LOCK_FILE} in it cannot be written ({error.strerror}); it names {named}"
            raise ConfigError.one(FIELD, folder, rule, self._remedy()) from None

    def release(self) -> None:
        """Releases the folder. A second call does nothing."""
        # with a kernel lock the file stays: a run that has just opened it would lock a deleted file
        if self._file >= 0 and not self._is_kernel_lock:
            self._path.unlink(missing_ok=True)
        self._close()

    def _take(self) -> bool:
        """Takes the kernel lock and returns True; False: this file system has no locks, and no other process
        is known to use the folder."""
        folder = self._path.parent
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            rule = f"another run is using it: {_in_words(_owner(folder))}"
            remedy = f"{FIELD}=<another folder>, or wait for it to end"
            raise ConfigError.one(FIELD, folder, rule, remedy) from None
        except OSError as error:
            owner, lacking = _owner(folder), f"this file system has no locks ({error.strerror})"
            if owner and _lives(owner) is not False:
                rule = f"another run may be using it, and {lacking}: {_in_words(owner)}"
                raise ConfigError.one(FIELD, folder, rule, self._remedy()) from None
            text = "%s: %s, so another run that starts there at the same moment is not noticed"
            logger.warning(text, folder, lacking)
            return False
        return True

    def _remedy(self) -> str:
        return f"{FIELD}=<another folder>, or rm {self._path} once that run has ended"

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def is_at_work(folder: Path) -> bool | None:
    """Whether the process that last took the folder is still alive; None: it is on another machine, or there
    was none.

    Does not try the lock: a run starting at that moment would be rejected.
    """
    return _lives(_owner(folder))


def _owner(folder: Path) -> dict[str, Any]:
    """The content of `.lock`; empty if unreadable."""
    return json_object(folder / LOCK_FILE) or {}


def _lives(owner: dict[str, Any]) -> bool | None:
    """Whether the process named in `.lock` is alive; None: none is named, or it is on another machine.

    A reused pid is detected by its start time.
    """
    pid = owner.get("pid")
    if not isinstance(pid, int) or owner.get("host") != socket.gethostname():
        return None
    ticks = _start_ticks(pid)
    return ticks is not None and owner.get("start_ticks", ticks) == ticks


def _me() -> dict[str, Any]:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())  # in a container the user may have no name
    process = {"pid": os.getpid(), "start_ticks": _start_ticks(os.getpid()), "host": socket.gethostname()}
    return process | {"user": user, "since": datetime.now().isoformat(timespec="seconds")}


def _start_ticks(pid: int) -> int | None:
    """Start time of a local process, in clock ticks since boot; None: there is no such pid."""
    try:
        return int(stat_fields(pid)[19])
    except (OSError, IndexError):
        return None


def _in_words(owner: dict[str, Any]) -> str:
    if not {"pid", "host", "user", "since"} <= owner.keys():
        return "a process that has not identified itself"
    return f"process {owner['pid']} on {owner['host']}, of {owner['user']}, since {owner['since']}"
