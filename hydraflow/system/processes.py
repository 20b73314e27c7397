"""What Linux says about a process. Standard library only."""

from __future__ import annotations

from pathlib import Path


def stat_fields(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on, which proc(5) counts as the third. Raises OSError if
    there is no such process.

    The program's name before them may hold spaces, parentheses and any bytes.
    """
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
