"""Kills Ray's agents once the process that started Ray has ended, however it ended.

In: its pid and theirs, as arguments. Left alone, the agents of a node process that was killed try for a
minute to report it to the control service, which ends with the command, too. A script of the standard library
alone, which `guard.py` starts.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress


def main(starter: int, agents: Sequence[int]) -> None:
    """Waits for the end of `starter`, then kills `agents`."""
    held = []
    for pid in agents:
        with suppress(ProcessLookupError):
            held.append(os.pidfd_open(pid))
    with suppress(ProcessLookupError):
        ends = select.poll()
        ends.register(os.pidfd_open(starter), select.POLLIN)
        if os.getppid() == starter:  # else it had ended before this process looked
            ends.poll()
    for agent in held:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(agent, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(pid) for pid in sys.argv[2:]])
