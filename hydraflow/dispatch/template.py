"""The template of a local cluster's worker processes, as seen by the process that starts Ray.

A worker process needs four seconds of CPU time to import torch, tensordict and transformers. Here one process
imports them (`forked_template.py`, else `template_server.py`) and forks for every worker that Ray starts
(`template_client.py`). A worker then needs half a second, and all share the libraries' memory. Left out on
purpose: joined clusters, and GPUs, because a fork must not share what GPU libraries may have opened.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from ray._private.node import Node

from hydraflow.dispatch.environment import shared_variables
from hydraflow.dispatch.forked_template import READY, listening
from hydraflow.dispatch.template_client import ADDRESS
from hydraflow.dispatch.template_server import LIBRARIES, WITHOUT_THREADS
from hydraflow.system.interrupts import blocked

HERE = Path(__file__).parent


def start_server(listener: socket.socket) -> psutil.Process:
    """Starts a template process, which ends with this one. SIGINT is blocked from its first moment on,
    because a terminal's Ctrl-C is for this process alone."""
    words = [str(listener.fileno()), str(os.getpid()), json.dumps(sys.path), json.dumps(LIBRARIES)]
    with blocked(signal.SIGINT):
        return psutil.Popen(
            [sys.executable, str(HERE / "template_server.py"), *words],
            env=os.environ | shared_variables() | WITHOUT_THREADS,
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # reserved for a command's report
        )


class Template:
    """The template process, as seen by the one that started it."""

    def __init__(self) -> None:
        if READY:
            self.address, pid = READY.pop()
            self.process = psutil.Process(pid)
        else:
            with listening() as listener:
                self.address = Path(listener.getsockname())
                self.process = start_server(listener)

    def stop(self) -> None:
        """Ends the template; its workers keep running."""
        self.address.unlink(missing_ok=True)
        with suppress(psutil.NoSuchProcess):
            self.process.kill()
        self.process.wait()


STARTED: list[Template] = []
"""The template of this process's Ray, while there is one."""


def forked_workers() -> list[psutil.Process]:
    """The live workers of this process's Ray that were forked, with all descendants."""
    found: list[psutil.Process] = []
    for template in STARTED:
        with suppress(psutil.NoSuchProcess):
            found += psutil.Process(template.process.pid).children(recursive=True)
    return found


def has_template() -> bool:
    """Whether this process's Ray forks its workers."""
    return bool(STARTED)


def stop_forking() -> None:
    """Stops the template, so that `forked_workers` is complete: no further worker can appear."""
    for template in STARTED:
        template.process.send_signal(signal.SIGSTOP)


def end_template() -> None:
    """Ends the template of this process's Ray, if there is one."""
    while STARTED:
        STARTED.pop().stop()


@contextmanager
def workers_from_template() -> Iterator[None]:
    """A Ray started in this block forks its workers, until `end_template`."""
    end_template()
    STARTED.append(Template())
    start = Node.start_raylet

    def start_raylet(node: Node, *args: Any, **kwargs: Any) -> None:
        node._ray_params.setup_worker_path = str(HERE / "template_client.py")
        start(node, *args, **kwargs)

    os.environ[ADDRESS] = str(STARTED[0].address)
    setattr(Node, start.__name__, start_raylet)
    try:
        yield
    finally:
        setattr(Node, start.__name__, start)
        del os.environ[ADDRESS]
