"""The template of worker processes: imports the libraries once and forks for each worker.

In: a listening socket, a search path and modules, as arguments; then requests (`template_client.py`). Out:
worker processes, which import only the rest. The template ends with the process that started it; Ray ends the
workers. It must have a single thread, because a fork copies no other. It does not import Ray, which reads its
settings on import: each worker has its own.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import resource
import runpy
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

LIBRARIES = (
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.nested._internal.ops",
    "tensordict",
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.models.auto.modeling_auto",
    "transformers.generation",
    "hydraflow.engine.fsdp.engine",
    "hydraflow.generation.native",
    "hydraflow.algorithms.actor_loss",
    "hydraflow.algorithms.advantages",
    "hydraflow.schema",
    # what Ray imports
    "google.protobuf.json_format",
    "google.protobuf.text_format",
    "google.protobuf.timestamp_pb2",
    "jsonschema",
    "msgpack",
    "numpy.ma",
    "pyarrow.json",
    "pydantic.fields",
    "pydantic.main",
    "pydantic.types",
    "pydantic.v1.typing",
    "requests",
    "wcwidth",
)
"""What a worker imports; none of these may start a thread or import Ray. A module that is missing here only
costs time, because each worker then imports it."""
WITHOUT_THREADS = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Variables that keep torch and pyarrow from starting threads on import. pyarrow contains jemalloc, which
starts one even though mimalloc is the allocator."""


def serve(listener: socket.socket, starter: int) -> dict[str, Any] | None:
    """Forks for every request until the process behind the descriptor `starter` (pidfd_open) ends. Returns
    the request in a worker; in the template None, at its end."""
    awaited = select.poll()
    awaited.register(listener, select.POLLIN)
    awaited.register(starter, select.POLLIN)
    while starter not in [descriptor for descriptor, _ in awaited.poll()]:
        if (request := _forked(listener)) is not None:
            os.close(starter)
            return request
    return None


def _forked(listener: socket.socket) -> dict[str, Any] | None:
    """Takes a request and forks. Returns the request in the worker, None in the template. On an error nothing
    is sent: a client without an answer becomes the worker itself."""
    try:
        connection, _ = listener.accept()
    except OSError:
        time.sleep(0.1)  # too many open files, for example
        return None
    with connection:
        streams: list[int] = []
        try:
            connection.settimeout(10.0)
            size, streams, _, _ = socket.recv_fds(connection, 8, 3)
            message = bytearray()
            while len(message) < int.from_bytes(size, "big"):
                if not (part := connection.recv(1 << 16)):
                    raise ConnectionError("the client has gone")
                message += part
            if os.fork() == 0:
                return _begin(listener, connection, streams, message)
        except OSError:
            pass
        for stream in streams:
            os.close(stream)
        return None


def _begin(
    listener: socket.socket, connection: socket.socket, streams: list[int], message: bytearray
) -> dict[str, Any]:
    """In a worker: takes the client's streams, answers, and returns the request."""
    try:
        listener.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        connection.sendall(b"1")
        return json.loads(message)
    except (OSError, ValueError):
        os._exit(1)


def become(
    argv: list[str],
    environ: dict[str, str],
    cwd: str,
    signals: list[int],
    oom_score: str,
    files: tuple[int, int],
) -> None:
    """Runs Ray's worker script in this process."""
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    with suppress(OSError):  # raising the score above the template's needs no privilege
        Path("/proc/self/oom_score_adj").write_text(oom_score)
    with suppress(OSError, ValueError):  # the hard limit can only be lowered
        resource.setrlimit(resource.RLIMIT_NOFILE, (files[0], files[1]))
    random.seed()  # a fork copies the generators' state, and all workers would draw the same numbers
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    runpy.run_path(argv[0], run_name="__main__")


def threads() -> int:
    """Number of threads of this process, including those that libraries started."""
    return len(os.listdir("/proc/self/task"))


def import_all(modules: Sequence[str]) -> None:
    """Imports the modules that can be imported here."""
    for name in modules:
        with suppress(ImportError, OSError, RuntimeError, AttributeError):  # a worker that needs it will fail
            importlib.import_module(name)
    assert "ray" not in sys.modules, "Ray would keep the template's settings"


def live(listener: socket.socket, starter: int) -> None:
    """Runs a template whose libraries are imported: forks workers until `starter` (a process id) ends.
    Returns only in a worker, at its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers that have ended are not waited for
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    gc.freeze()  # a collection in a worker would touch, and so copy, the shared pages
    gc.enable()
    asked = None
    with suppress(ProcessLookupError):
        starting = os.pidfd_open(starter)
        if os.getppid() == starter and threads() == 1:  # with more threads, Ray starts workers as usual
            asked = serve(listener, starting)
    if asked is not None:
        become(**asked)
        return
    with suppress(OSError):
        os.unlink(listener.getsockname())
    os._exit(0)  # without waiting for threads


if __name__ == "__main__":
    listening, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    sys.path[:] = json.loads(sys.argv[3])
    gc.disable()
    import_all(json.loads(sys.argv[4]))
    live(listening, parent)
