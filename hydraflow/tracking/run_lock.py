"""One run at a time in a run folder, and who it is.

In: a folder. Out: a lock that the kernel gives back when the process ends, however it ends; the file `.lock` names its owner.
"""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import socket
from datetime import datetime
from pathlib import Path

from hydraflow.errors import ConfigError

LOCK_FILE = ".lock"


class RunLock:
    """Held until `release`. Raises ConfigError, naming the owner, when another process holds it."""

    def __init__(self, folder: Path, *, field: str):
        self._file = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            rule = f"another run is at work there: {_owner(folder)}"
            os.close(self._file)
            raise ConfigError.one(field, folder, rule, f"{field}=<another folder>, or wait for it to end") from None
        me = {"pid": os.getpid(), "host": socket.gethostname(), "user": _user(), "since": datetime.now().isoformat(timespec="seconds")}
        me["started"] = _started(os.getpid())
        os.truncate(self._file, 0)
        os.pwrite(self._file, json.dumps(me).encode(), 0)

    def release(self) -> None:
        """Lets others have the folder. A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def is_at_work(folder: Path) -> bool | None:
    """Whether the process that took the folder last still lives; None: it is on another machine, or nobody has taken it.

    It does not try the lock: a run that starts in that moment would be refused.
    """
    try:
        owner = json.loads((folder / LOCK_FILE).read_text())
        pid, host, started = int(owner["pid"]), owner["host"], owner.get("started")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if host != socket.gethostname():
        return None
    now = _started(pid)
    return now is not None and started in (None, now)  # else its number has been given to another process


def _started(pid: int) -> int | None:
    """When a process began, in the kernel's ticks since the machine did; None: there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name before it may hold anything
    except OSError:
        return None
    return int(fields[19])


def _owner(folder: Path) -> str:
    try:
        owner = json.loads((folder / LOCK_FILE).read_text())
        return f"process {owner['pid']} on {owner['host']}, of {owner['user']}, since {owner['since']}"
    except (OSError, ValueError, KeyError):
        return "it has not said yet who it is"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())  # a container whose user has no name
