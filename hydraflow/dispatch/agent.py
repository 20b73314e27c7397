"""What Ray starts here in place of its dashboard agent, which it refuses to do without.

In: the agent's command line. Out: the files in which Ray looks for its ports; they say that there are none.
Ray's own agent, without a dashboard, does no more, and takes a second of a core and 100 MiB to import what it
needs for that. A script of the standard library alone; it ends with the node process, which ends if it does.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
NOT_IN_USE = "-1"


def main(arguments: Sequence[str]) -> None:
    """Writes the files, then waits for the end of the node process, its parent."""
    parent = int(os.environ.get("RAY_RAYLET_PID") or os.getppid())
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--session-dir", required=True)
    parser.add_argument("--node-id", required=True)
    asked, _ = parser.parse_known_args(arguments)
    for port in PORTS:
        file = Path(asked.session_dir) / f"{port}_{asked.node_id}"
        unfinished = file.with_suffix(".new")
        unfinished.write_text(NOT_IN_USE)
        unfinished.replace(file)
    with suppress(ProcessLookupError):
        ends = select.poll()
        ends.register(os.pidfd_open(parent), select.POLLIN)
        if os.getppid() == parent:  # else it had ended before this process looked
            ends.poll()


if __name__ == "__main__":
    main(sys.argv[1:])
