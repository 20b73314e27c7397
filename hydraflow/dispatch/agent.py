"""Stand-ins for Ray's two agents; Ray's node process does not run without them.

In: an agent's command line. Out: the files in which Ray looks for the agents' ports. Ray's own agents take a
second of CPU time and 100 MiB each for their imports.

The dashboard's agent is replaced by files that say that it has no ports: without a dashboard it does nothing
more.

The runtime-environment agent is replaced by a process that listens on the agent's port, reports it, and
executes the agent when the first request arrives, which is for the first worker with a runtime environment.
Ray's node process waits for the port and aborts if it is not reported within 15 seconds; on a busy machine
the agent's imports take longer. The request waits for them (`agent_register_timeout_ms`).

Both are killed when the node process ends, however it ends, and it ends when they do. Otherwise the
runtime-environment agent would spend a minute reporting a killed node process to a control service that may
be gone as well. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

DASHBOARD, RUNTIME_ENV, REQUESTED = "dashboard", "runtime_env", "requested"
"""First argument: which agent, or that the runtime-environment agent is needed."""
PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
NOT_IN_USE = "-1"
RUNTIME_ENV_PORT = "runtime_env_agent_port"
_SIGNAL_AT_PARENTS_END = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def stand_in(arguments: Sequence[str]) -> None:
    """Writes the files of the dashboard's agent, then waits to be killed."""
    options = _options(arguments)
    for port in PORTS:
        _report(options, port, NOT_IN_USE)
    while True:
        signal.pause()


def start_when_requested(command: Sequence[str]) -> None:
    """Listens on a port, reports it as the runtime-environment agent's, and becomes that agent at the
    first connection."""
    options, key, words = _options(command), "runtime-env-agent-port", list(command)
    with suppress(OSError, ValueError, StopIteration):  # the agent itself reports what is wrong
        place = socket.getaddrinfo(options["node-ip-address"], int(options[key]), type=socket.SOCK_STREAM)[0]
        held = socket.socket(*place[:2])
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(place[4])
        held.listen()
        port = str(held.getsockname()[1])
        _report(options, RUNTIME_ENV_PORT, port)
        script = next(number for number, word in enumerate(words) if word.endswith(".py"))
        select.select([held], [], [])
        held.set_inheritable(True)
        words = [f"--{key}={port}" if word.startswith(f"--{key}=") else word for word in words]
        words[script:script] = [__file__, REQUESTED, str(held.fileno()), port]
    os.execv(words[0], words)


def run_with_socket(descriptor: int, port: int, script: str, *arguments: str) -> None:
    """Runs an agent, in which the socket that is bound to this port becomes the listening one behind the
    descriptor: nobody has to connect twice."""
    bind = socket.socket.bind

    def bind_or_take(self: socket.socket, address: Any) -> None:
        if not isinstance(address, tuple) or address[1] != port:
            bind(self, address)
        else:
            os.dup2(descriptor, self.fileno(), inheritable=False)
            os.close(descriptor)

    setattr(socket.socket, bind.__name__, bind_or_take)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def _end_with_the_node() -> None:
    """Asks the kernel to kill this process when its parent ends, also after an exec. The parent is Ray's node
    process, whose pid is in RAY_RAYLET_PID. (`system/tether.py` does the same; this script imports nothing of
    the package.)"""
    node = int(os.environ.get("RAY_RAYLET_PID") or os.getppid())
    ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENTS_END, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != node:  # it ended before the kernel was asked
        sys.exit()


def _options(words: Sequence[str]) -> dict[str, str]:
    """Name -> value of the arguments of the form --name=value."""
    pairs = (word.removeprefix("--").partition("=") for word in words if word.startswith("--"))
    return {name: value for name, _, value in pairs}


def _report(options: Mapping[str, str], port: str, value: str) -> None:
    file = Path(options["session-dir"]) / f"{port}_{options['node-id']}"
    unfinished = file.with_suffix(".new")
    unfinished.write_text(value)
    unfinished.replace(file)  # Ray polls for the file and must not read it half written


if __name__ == "__main__":
    if sys.argv[1] == REQUESTED:
        run_with_socket(int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    else:
        _end_with_the_node()
        ({DASHBOARD: stand_in, RUNTIME_ENV: start_when_requested})[sys.argv[1]](sys.argv[2:])
