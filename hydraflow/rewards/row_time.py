"""How long a row has taken, without the time that its process waited for a CPU: a busy machine must not fail
rows.

In: a pid. Out: when a row's time is up. Linux counts per thread how long it was runnable but not running (the
second number of /proc/<pid>/schedstat); only the main thread's is read, where the reward function runs. Left
out on purpose: the waits of processes that a function starts itself."""

from __future__ import annotations

import os

MOST = 4.0
"""Wall time after which a row always fails, as a multiple of its limit."""


class QueueTime:
    """Seconds that a process's main thread waited for a CPU; 0.0 where the kernel does not count them."""

    def __init__(self, pid: int):
        try:
            self._file: int | None = os.open(f"/proc/{pid}/schedstat", os.O_RDONLY)
        except OSError:
            self._file = None

    def seconds(self) -> float:
        """Seconds waited since the process started."""
        if self._file is None:
            return 0.0
        try:
            return int(os.pread(self._file, 128, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # the process is gone, or a reward function closed our file
            return 0.0

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def over_at(began: float, limit: float, waited: float) -> float:
    """The deadline of a row that started at `began` and has `waited` for a CPU since then.

    >>> over_at(100.0, 10.0, 0.0), over_at(100.0, 10.0, 2.5), over_at(100.0, 10.0, 500.0)
    (110.0, 112.5, 140.0)
    """
    return began + min(limit + max(0.0, waited), MOST * limit)
