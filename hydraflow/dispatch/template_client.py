"""Ray starts this script as a worker process of a local cluster: it asks the template for a fork and exits.

In: Ray's command line, and the template's address in the environment. Out: a worker process with this one's
arguments, environment, folder, streams and signal mask. If no template answers, or if Ray prepares an
environment for the process, this process becomes the worker, as Ray's own script does. Standard library only,
so it costs only 20 milliseconds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path

ADDRESS = "HYDRAFLOW_WORKER_TEMPLATE"
"""Environment variable with the path of the template's socket."""
PATIENCE = 120.0
"""Seconds for a template that is still importing. Ray gives up on a process after 180 (`RAY_SETTINGS`)."""
LANGUAGE, ENVIRONMENT = "--language=", "--serialized-runtime-env-context="
"""Arguments for Ray's own script."""


def fork_worker(argv: list[str]) -> bool:
    """Asks the template for a worker; False when there is none."""
    try:
        facts = {
            "argv": [word for word in argv if not word.startswith(LANGUAGE)],
            "environ": dict(os.environ),
            "cwd": os.getcwd(),
            "signals": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "oom_score": Path("/proc/self/oom_score_adj").read_text(),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),  # Ray raises it for its processes
        }
        message = json.dumps(facts).encode()
        with socket.socket(socket.AF_UNIX) as template:
            template.settimeout(PATIENCE)
            template.connect(os.environ[ADDRESS])
            socket.send_fds(template, [len(message).to_bytes(8, "big")], [0, 1, 2])
            template.sendall(message)
            return bool(template.recv(1))  # one byte from the worker; empty if the fork failed
    except (OSError, KeyError):
        return False


def become_worker(argv: list[str]) -> None:
    """Continues with the script that Ray would have started."""
    found = importlib.util.find_spec("ray")
    assert found is not None and found.origin is not None, "Ray started this process"
    script = Path(found.origin).parent / "_private" / "workers" / "setup_worker.py"
    os.execv(sys.executable, [sys.executable, str(script), *argv])


if __name__ == "__main__":
    words = sys.argv[1:]
    if any(word.startswith(ENVIRONMENT) for word in words) or not fork_worker(words):
        become_worker(words)
