"""The template of worker processes as a fork of the command itself.

A command imports torch, tensordict and transformers anyway. Forked right after that, a template costs nothing
and is ready before Ray is; one that is started later (`template.py`) repeats those imports, which takes three
seconds of CPU time. In: the sections for Ray and the trainer. Out: `READY`, which the first Ray of this
process takes. Neither this module nor its imports may import Ray, because Ray reads its settings on import.
"""

from __future__ import annotations

import atexit
import os
import secrets
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from hydraflow.device import planned_type
from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.template_server import LIBRARIES, WITHOUT_THREADS, import_all, live, threads
from hydraflow.errors import HydraflowError
from hydraflow.system.interrupts import FOR_THE_COMMAND, SHUTDOWN, blocked
from hydraflow.system.node_folder import session_folder
from hydraflow.trainer.config import RunConfig

READY: list[tuple[Path, int]] = []
"""Address and process id of the template, until a Ray takes it."""


def fork_template(ray_init: RayInitConfig, trainer: RunConfig) -> None:
    """Imports what a worker imports, and forks a template. Does nothing where workers are not forked (a
    joined cluster, GPUs, a run in this process), or where this process has a second thread or Ray, which a
    fork must not copy. Errors are ignored here: Ray's start reports them with all other faults.
    """
    if ray_init.address != "local" or planned_type(trainer.device) != "cpu" or trainer.debug.local:
        return
    if "ray" not in sys.modules:
        with _without_threads():
            import_all(LIBRARIES)
        if threads() == 1:
            with suppress(HydraflowError, OSError):
                _fork()


def _fork() -> None:
    with listening() as listener, blocked(signal.SIGINT):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # otherwise every worker would print the buffered text again
        starter = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_template(listener, starter)
        READY.append((Path(listener.getsockname()), pid))


@contextmanager
def listening() -> Iterator[socket.socket]:
    """A new listening socket for a template, in Ray's folder; the block's end closes it in this process."""
    address = session_folder() / f"template.{os.getpid()}.{secrets.token_hex(4)}"
    address.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(1024)
        yield listener


@contextmanager
def _without_threads() -> Iterator[None]:
    """Keeps libraries imported in the block from starting threads; workers set their own number later."""
    before = {name: os.environ.get(name) for name in WITHOUT_THREADS}
    os.environ.update(WITHOUT_THREADS)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def _become_template(listener: socket.socket, starter: int) -> NoReturn:
    """In the fork: keeps only the listener and the error stream open, and never returns to the command."""
    code = 1
    try:
        SHUTDOWN.commanded = False
        signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_COMMAND)  # as for all processes of a local Ray
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):
            os.dup2(nothing, stream)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor not in (0, 1, 2, listener.fileno()):
                with suppress(OSError):  # listdir's own descriptor is already closed
                    os.close(descriptor)
        live(listener, starter)
        code = 0
    except SystemExit as wanted:
        code = wanted.code if isinstance(wanted.code, int) else int(wanted.code is not None)
    finally:  # in every case: the frames above belong to the command and must not run in the fork
        if isinstance(error := sys.exc_info()[1], BaseException):
            traceback.print_exception(error)
        _leave(code)


def _leave(code: int) -> NoReturn:
    """Ends a worker as a normal interpreter exit would: threads joined, exit handlers run, streams
    flushed."""
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
