"""Runs a command in a process forked from one that has already imported the libraries.

`python -m hydraflow.main_ppo` takes six seconds of processor time before it reads its first argument, nearly
all of them for imports. Here one server for each process of the test run imports them once and forks for
every command. The child has the working directory, environment, arguments and streams of the command, runs
its module or file as `__main__`, and leaves as an interpreter leaves: an exit code, or a stack trace. What
differs from a process of its own: the libraries are imported, /proc shows the server's command line and
environment, and all commands share one seed of hashes.

The workers' template (`hydraflow/dispatch/template.py`), which a command starts with its Ray, is a fork, too:
of a second server, which has imported the libraries and not Ray.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

PRELOADED = ("ppo", "sft", "generate", "evaluate")
"""Modules of `hydraflow.jobs` that import what the others import, too."""

READ_LATER = (
    *("PYTEST_", "RAY_", "PYTHONBREAKPOINT"),
    *("COLUMNS", "HYDRA_FULL_ERROR", "HYDRAFLOW_", "COMP_LINE", "PATH", "SLURM_", "MLFLOW_"),
)
"""Variables that no library reads while it is imported, by their beginnings. Ray sets its own, and a
debugger's, where a test has started it in its own process; commands start a Ray of their own."""
STARTED: list[Server] = []
"""The server of this process, once a command was run."""
ASKED: list[dict[str, str]] = []
"""The environment of the last command, for each of up to three commands in a row that had it."""


def server(environ: dict[str, str]) -> Server | None:
    """The server of this process for a command with this environment; None: it needs a process of its own.

    A test may change the environment for itself, and some change it for all that follow: three commands in a
    row with the same one get a server with it, which costs as much as two processes.
    """
    if environ.get("RAY_AUTH_MODE", "token") != "token":
        return None
    asked = relevant(environ)
    ASKED[:] = [*ASKED, asked][-3:] if asked in ASKED else [asked]
    if STARTED and STARTED[0].environ != asked:
        if len(ASKED) < 3:
            return None
        STARTED.pop().stop()
    if not STARTED:
        STARTED.append(Server(environ))
    return STARTED[0]


def relevant(environ: dict[str, str]) -> dict[str, str]:
    """Variables that a library may read while it is imported."""
    return {name: value for name, value in environ.items() if not name.startswith(READ_LATER)}


class Server:
    """The process that forks, from the side of the tests. It ends with the process that started it."""

    def __init__(self, environ: dict[str, str], *, preloads: bool = True) -> None:
        self.environ = relevant(environ)
        self._commands = 0
        self._socket, theirs = socket.socketpair()
        # Ray reads its mode once: one that a test's own Ray has set since would not count in the fork
        mine = {name: value for name, value in environ.items() if not name.startswith("RAY_")}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *(["preload"] if preloads else [])],
                env=mine | {"RAY_AUTH_MODE": "token"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._answers = self._socket.makefile()

    def run(
        self, *words: str, cwd: Path, environ: dict[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """`python words`, where the first words are -m and a module, or a file; with what it printed."""
        argv = [sys.executable, *words]
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            try:
                code = self._exchange(argv, cwd, environ, [out.fileno(), err.fileno()], timeout)
            except TimeoutError:
                self.abandon()
                raise subprocess.TimeoutExpired(argv, timeout, text(out), text(err)) from None
            except BaseException:  # Ctrl-C and pytest-timeout's, too: an answer may be half read
                self.abandon()
                raise
            return subprocess.CompletedProcess(argv, code, text(out), text(err))

    def _exchange(
        self, argv: list[str], cwd: Path, environ: dict[str, str], streams: list[int], timeout: float
    ) -> int:
        """The exit code of a command."""
        self._commands += 1
        request = json.dumps(
            {"command": self._commands, "argv": argv, "cwd": str(cwd), "environ": environ}
        ).encode()
        self._socket.settimeout(timeout + 60)  # the server may still be importing
        socket.send_fds(self._socket, [f"{len(request):08}".encode()], streams)
        self._socket.sendall(request)
        self._answer("pid")
        self._socket.settimeout(timeout)
        return self._answer("code")

    def _answer(self, what: str) -> int:
        """The number of that name in the next line, which must be about the last command."""
        line = self._answers.readline()
        if not line:
            raise EOFError("the server that forks has ended")
        answer = json.loads(line)
        assert answer["command"] == self._commands and what in answer, (answer, self._commands, what)
        return answer[what]

    def abandon(self) -> None:
        """Kills the server with all that it has forked; the next command gets another one."""
        if self in STARTED:
            STARTED.remove(self)
        parent = psutil.Process(self._process.pid)
        parent.suspend()  # it might fork once more
        for process in [*parent.children(recursive=True), parent]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.stop()

    def stop(self) -> None:
        self._answers.close()
        self._socket.close()
        self._process.wait(timeout=30)


def text(file: tempfile._TemporaryFileWrapper[bytes]) -> str:
    file.seek(0)
    return file.read().decode().replace("\r\n", "\n")


def preload() -> None:
    """Imports what commands import, and composes a configuration, which makes Hydra's parsers."""
    import importlib

    from hydraflow.compose.loading import load
    from hydraflow.schema import PPOConfig

    for name in PRELOADED:
        importlib.import_module(f"hydraflow.jobs.{name}")
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    load("ppo", PPOConfig, ["recipe=arithmetic"])


class ForkedTemplate:
    """What `template.start_server` returns in a command that was forked."""

    def __init__(self, pid: int):
        self.pid = pid
        self._process = psutil.Process(pid)

    def kill(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self._process.kill()

    def send_signal(self, number: int) -> None:
        with suppress(psutil.NoSuchProcess):
            self._process.send_signal(number)

    def wait(self) -> None:
        self._process.wait(timeout=30)


def fork_templates(requests: socket.socket, server: Any, commands: int) -> None:
    """Forks a template of workers for every process that sends its id, a listening socket and one for the
    answer, until the process behind the descriptor `commands` ends."""
    awaited = select.poll()
    awaited.register(requests, select.POLLIN)
    awaited.register(commands, select.POLLIN)
    while commands not in [descriptor for descriptor, _ in awaited.poll()]:
        message, descriptors, _, _ = socket.recv_fds(requests, 8, 2)
        listener, answers = (socket.socket(fileno=descriptor) for descriptor in descriptors)
        try:
            command = os.pidfd_open(int.from_bytes(message, "big"))
        except ProcessLookupError:  # it was killed meanwhile
            listener.close()
            answers.close()
            continue
        pid = os.fork()
        if pid == 0:
            for inherited in (requests, answers):
                inherited.close()
            os.close(commands)
            asked = server.serve(listener, command)
            if asked is not None:
                server.become(**asked)
            return
        os.close(command)
        listener.close()
        with answers:
            answers.sendall(pid.to_bytes(8, "big"))


def import_server() -> Any:
    """`template_server.py`, without its package, which imports Ray."""
    path = Path(__file__).parents[1] / "hydraflow" / "dispatch" / "template_server.py"
    spec = importlib.util.spec_from_file_location("template_server", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start_templates() -> socket.socket:
    """Imports the libraries of workers and forks the process that forks their templates; returns where to ask
    for one."""
    from hydraflow.dispatch.environment import shared_variables

    server = import_server()
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    os.environ.update(shared_variables())
    server.import_all(server.LIBRARIES)
    gc.freeze()
    assert server.threads() == 1
    commands = os.getpid()
    if os.fork() == 0:
        mine.close()
        connection.close()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a template that has ended
        fork_templates(theirs, server, os.pidfd_open(commands))
        sys.exit(0)
    theirs.close()
    return mine


def use_templates(templates: socket.socket) -> None:
    """In a command: its Ray gets a forked template."""
    from hydraflow.dispatch import template

    def start_server(listener: socket.socket) -> ForkedTemplate:
        mine, theirs = socket.socketpair()
        with mine, theirs:
            descriptors = [listener.fileno(), theirs.fileno()]
            socket.send_fds(templates, [os.getpid().to_bytes(8, "big")], descriptors)
            theirs.close()
            mine.settimeout(60)
            return ForkedTemplate(int.from_bytes(mine.recv(8), "big"))

    template.start_server = start_server  # type: ignore[assignment]


def serve(requests: socket.socket) -> dict | None:
    """Forks for every request and reports the child's id and exit code, each with the command's number.
    Returns the request in a child, and None at the end."""
    while True:
        size, streams, _, _ = socket.recv_fds(requests, 8, 2)
        if not size:
            return None
        request = bytearray()
        while len(request) < int(size):
            request += requests.recv(int(size) - len(request))
        asked = json.loads(request)
        command = asked.pop("command")
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number, stream in enumerate(streams, start=1):
                os.dup2(stream, number)
                os.close(stream)
            requests.close()
            return asked
        for stream in streams:
            os.close(stream)
        answer(requests, {"command": command, "pid": pid})
        _, status = os.waitpid(pid, 0)
        answer(requests, {"command": command, "code": os.waitstatus_to_exitcode(status)})


def answer(requests: socket.socket, facts: dict[str, int]) -> None:
    """One line of JSON."""
    requests.sendall(json.dumps(facts).encode() + b"\n")


def become(argv: list[str], cwd: str, environ: dict[str, str]) -> int:
    """Runs a module in this process as `python -m` does, or a file; returns the exit code."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.orig_argv[:] = argv
    is_module = argv[1] == "-m"
    sys.argv = argv[2:] if is_module else argv[1:]
    sys.path[0] = cwd if is_module else str(Path(argv[1]).parent)
    try:
        if is_module:
            runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[1], run_name="__main__")
    except SystemExit as wanted:
        if wanted.code is None or isinstance(wanted.code, int):
            return wanted.code or 0
        print(wanted.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """Ends this process as an interpreter does, but frees no memory: that would copy the server's pages."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the tests and the command
    connection = socket.socket(fileno=int(sys.argv[1]))
    templates = None
    if sys.argv[2:]:
        templates = start_templates()
        gc.disable()
        preload()
        gc.enable()
    gc.collect()
    gc.freeze()  # a child that collected garbage would copy every page
    asked = serve(connection)
    if asked is not None:
        if templates is not None:
            use_templates(templates)
        leave(become(**asked))
