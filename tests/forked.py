"""Runs a command in a process forked from one that has already imported the libraries.

`python -m hydraflow.main_ppo` takes six seconds of processor time before it reads its first argument, nearly
all of them for imports. Here one server for each process of the test run imports them once and forks for
every command. The child has the working directory, environment, arguments and streams of the command, runs
its module or file as `__main__`, and leaves as an interpreter leaves: an exit code, or a stack trace. What
differs from a process of its own: the libraries are imported, /proc shows the server's command line and
environment, all commands share one seed of hashes, and those in the foreground draw no curves.

The workers' template (`hydraflow/dispatch/template.py`), which a command starts with its Ray, is a fork, too:
of a second server, which has imported the libraries and not Ray. Commands in the background are forks of a
third, which has not imported Ray either: they make a template of their own, as commands do, and have the tree
of processes that a user's command has.
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

PRELOADED = (
    *("jobs.ppo", "jobs.sft", "jobs.generate", "jobs.evaluate"),
    *("engine.fsdp.engine", "generation.native", "workers.actor", "workers.rollout"),
)
"""Modules of `hydraflow` that import what the others import, too, and what a run in one process imports
later."""

READ_LATER = (
    *("PYTEST_", "RAY_", "PYTHONBREAKPOINT"),
    *("COLUMNS", "HYDRA_FULL_ERROR", "HYDRAFLOW_", "COMP_LINE", "PATH", "SLURM_"),
    *("MLFLOW_", "SWANLAB_", "WANDB_", "HOME", "MY_"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "GLOO_SOCKET_IFNAME"),
)
"""Variables that no library reads while it is imported, by their beginnings. Ray sets its own, and a
debugger's, where a test has started it in its own process; commands start a Ray of their own; a run in the
process of the tests sets the folders of compilers and gloo's interface. Trackers are imported by the command
itself, and look for a login in its home; of the server's home the libraries know where their caches are."""
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
    if STARTED and STARTED[0].environ != asked and len(ASKED) < 3:
        return None
    return needed_server(environ)


def needed_server(environ: dict[str, str]) -> Server:
    """The server of this process, with this environment: for a command that must be a fork."""
    if STARTED and STARTED[0].environ != relevant(environ):
        STARTED.pop().stop()
    if not STARTED:
        STARTED.append(Server(environ))
    return STARTED[0]


def relevant(environ: dict[str, str]) -> dict[str, str]:
    """Variables that a library may read while it is imported, with those that a command would set itself."""
    from hydraflow.dispatch.environment import shared_variables

    environ = environ | shared_variables(environ)
    return {name: value for name, value in environ.items() if not name.startswith(READ_LATER)}


class Server:
    """The process that forks, from the side of the tests. It ends with the process that started it."""

    def __init__(self, environ: dict[str, str], *, preloads: bool = True) -> None:
        self.environ = relevant(environ)
        self._commands = 0
        self._socket, theirs = socket.socketpair()
        self._background, theirs_too = socket.socketpair()
        # Ray reads its mode once: one that a test's own Ray has set since would not count in the fork
        mine = {name: value for name, value in environ.items() if not name.startswith("RAY_")}
        with theirs, theirs_too:
            passed = [theirs.fileno(), theirs_too.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, __file__, *map(str, passed), *(["preload"] if preloads else [])],
                env=mine | {"RAY_AUTH_MODE": "token"},
                pass_fds=passed,
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

    def start(self, *words: str, cwd: Path, environ: dict[str, str], log: Path) -> Background:
        """`python words` in the background, in a session of its own; what it prints goes into `log`."""
        mine, theirs = socket.socketpair()
        request = {"argv": [sys.executable, *words], "cwd": str(cwd), "environ": environ}
        with theirs, log.open("w") as out:
            send(self._background, request, [out.fileno(), theirs.fileno()])
        return Background(mine)

    def _exchange(
        self, argv: list[str], cwd: Path, environ: dict[str, str], streams: list[int], timeout: float
    ) -> int:
        """The exit code of a command."""
        self._commands += 1
        self._socket.settimeout(timeout + 60)  # the server may still be importing
        request = {"command": self._commands, "argv": argv, "cwd": str(cwd), "environ": environ}
        send(self._socket, request, streams)
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
        self._background.close()
        self._process.wait(timeout=30)


class Background:
    """A command in the background, with what tests use of `subprocess.Popen`."""

    def __init__(self, answers: socket.socket):
        self._answers = answers
        self._code: int | None = None
        self.pid = self._answer(60)  # the server may still be importing

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float) -> int:
        if self._code is None:
            self._code = self._answer(timeout)
        return self._code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _answer(self, timeout: float) -> int:
        if not select.select([self._answers], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a command in the background", timeout)
        answer = self._answers.recv(8)
        assert answer, "what waits for the command was killed"
        return int.from_bytes(answer, "big", signed=True)


def send(to: socket.socket, request: dict[str, Any], descriptors: list[int]) -> None:
    """Two messages: the request's size with the descriptors, and the request."""
    message = json.dumps(request).encode()
    socket.send_fds(to, [f"{len(message):08}".encode()], descriptors)
    to.sendall(message)


def received(requests: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next request with its descriptors; None at the end."""
    size, descriptors, _, _ = socket.recv_fds(requests, 8, 2)
    if not size:
        return None
    message = bytearray()
    while len(message) < int(size):
        message += requests.recv(int(size) - len(message))
    return json.loads(message), descriptors


def text(file: tempfile._TemporaryFileWrapper[bytes]) -> str:
    file.seek(0)
    return file.read().decode().replace("\r\n", "\n")


def preload() -> None:
    """Imports what commands import."""
    import importlib

    for name in PRELOADED:
        importlib.import_module(f"hydraflow.{name}")
    from hydraflow.jobs import session

    session.draw_curve = lambda *_, **__: True  # it takes a tenth of a second
    import ray._common.pydantic_compat  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("qwen3")  # made once for all types, the first time a model is loaded

    with suppress(ImportError):
        import pandas  # noqa: F401  pyarrow imports it, where it is installed, to convert a list

    compose()


def compose() -> None:
    """Composes a configuration, which makes Hydra's parsers."""
    from hydraflow.compose.loading import load
    from hydraflow.schema import PPOConfig

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
    os.environ.update(shared_variables() | server.WITHOUT_THREADS)
    server.import_all(server.LIBRARIES)
    gc.freeze()
    assert server.threads() == 1
    commands = os.getpid()
    if os.fork() == 0:
        gc.enable()
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
    while (found := received(requests)) is not None:
        asked, streams = found
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
    return None


def serve_background(requests: socket.socket) -> dict | None:
    """Forks a process for every request, which forks the command and waits for it. Returns the request in a
    command, and None at the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    while (found := received(requests)) is not None:
        asked, (log, answers) = found
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            with socket.socket(fileno=answers) as answer_to:
                if begin(log, answer_to):
                    return asked
            os._exit(0)
        os.close(log)
        os.close(answers)
    return None


def begin(log: int, answers: socket.socket) -> bool:
    """Forks the command, and answers with its id and then with its exit code. True in the command."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (1, 2):
            os.dup2(log, number)
        os.close(log)
        return True
    answers.sendall(pid.to_bytes(8, "big", signed=True))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(BrokenPipeError):  # the test has ended
        answers.sendall(code.to_bytes(8, "big", signed=True))
    return False


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


def run_in_background(requests: socket.socket) -> None:
    """The life of the server of commands in the background."""
    gc.collect()
    gc.freeze()
    gc.enable()
    asked = serve_background(requests)
    if asked is not None:
        leave(become(**asked))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the tests and the command
    connection, background = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    preloads, templates = bool(sys.argv[3:]), None
    gc.disable()
    if preloads:
        templates = start_templates()
    if os.fork() == 0:
        connection.close()
        if preloads:
            compose()
            assert "ray" not in sys.modules, "a command would not fork its template"
        run_in_background(background)
        sys.exit(0)
    background.close()
    if preloads:
        preload()
    gc.collect()
    gc.freeze()  # a child that collected garbage would copy every page
    gc.enable()
    asked = serve(connection)
    if asked is not None:
        if templates is not None:
            use_templates(templates)
        leave(become(**asked))
