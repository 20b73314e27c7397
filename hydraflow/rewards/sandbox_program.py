"""The first process in a sandbox: runs a program on one input after the other, within limits.

In (standard input, JSON): `source`, `inputs` (what each test writes to standard input, or the arguments of
`function`), and the limits of `reward.sandbox`. Out (standard output, JSON lines): for each test how it ended
and what it printed or returned. It never has the right answers, so a program that takes it over has nothing
to gain. After a test that exceeds a limit no others are run. This script uses only the standard library
and is passed to the interpreter as text, because the sandbox has none of our files.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import resource
import select
import signal
import sys
import time
import types
from typing import Any

DONE, RAISED, TOO_LONG, TOO_MUCH = "done", "raised", "took too long", "printed too much"
_SET_SECCOMP, _BY_FILTER = 22, 2
"""Arguments of prctl."""


def main() -> None:
    """Returns in a test's process as well, after its program, so that the interpreter exits normally."""
    request = json.load(sys.stdin)
    _limit(request)
    ends = time.monotonic() + request["seconds"]
    for given in request["inputs"]:
        left = min(request["timeout"], ends - time.monotonic())
        reader, writer = os.pipe()
        if not (pid := os.fork()):
            os.close(reader)
            _run(request["source"], request["function"], given, writer)
            return
        os.close(writer)
        how, output = _watch(pid, reader, left, request["output"])
        os.close(reader)
        print(json.dumps([how, output.decode(errors="backslashreplace")]), flush=True)
        if how in (TOO_LONG, TOO_MUCH):
            return


def _limit(request: dict[str, Any]) -> None:
    os.chdir("/tmp")
    # the kernel delivers other signals to the first process of a namespace only if it handles them
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _filter_calls(bytes.fromhex(request["calls"]))
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)
    limits = {
        resource.RLIMIT_AS: request["memory"],
        resource.RLIMIT_FSIZE: request["memory"],
        resource.RLIMIT_NPROC: request["processes"] + 1,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        resource.setrlimit(kind, (most, most))


def _filter_calls(program: bytes) -> None:
    """Installs the filter of system calls (`sandbox_calls.py`)."""

    class Filter(ctypes.Structure):
        _fields_ = (("steps", ctypes.c_ushort), ("program", ctypes.c_char_p))

    libc = ctypes.CDLL(None, use_errno=True)
    given = Filter(len(program) // 8, program)
    if libc.prctl(_SET_SECCOMP, _BY_FILTER, ctypes.byref(given), 0, 0):
        sys.exit(f"system calls cannot be filtered (seccomp): {os.strerror(ctypes.get_errno())}")


def _run(source: str, function: str | None, given: Any, writer: int) -> None:
    """Runs the program as the main module. With `function`, also calls it and writes its result as JSON."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stdin = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    with open(stdin, "wb", closefd=False) as file:
        file.write(given.encode(errors="surrogatepass") if function is None else b"")
    os.lseek(stdin, 0, os.SEEK_SET)
    os.dup2(stdin, 0)
    os.dup2(writer if function is None else 2, 1)
    sys.stdin = io.TextIOWrapper(open(0, "rb"), encoding="utf-8")  # noqa: SIM115
    sys.argv = ["solution.py"]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(source, "solution.py", "exec"), module.__dict__)  # its own exceptions end this process
    if function is None:
        os.close(writer)  # standard output is a copy of it
        return
    owner = module.__dict__.get("Solution")
    called = getattr(owner(), function) if owner else module.__dict__[function]
    with open(writer, "w") as file:
        json.dump(called(*given), file, default=list)


def _watch(pid: int, reader: int, seconds: float, most: int) -> tuple[str, bytes]:
    """How the program ended, and its output. All of its processes are gone when this returns."""
    ends, output, how = time.monotonic() + seconds, b"", ""
    process = os.pidfd_open(pid)
    watched = [reader, process]
    while not how:
        ready, _, _ = select.select(watched, [], [], max(0.0, ends - time.monotonic()))
        if reader in ready and (piece := os.read(reader, 65_536)):
            output += piece
            how = TOO_MUCH if len(output) > most else ""
        elif process in ready:  # and nothing is left to read
            _, status = os.waitpid(pid, 0)
            how = DONE if status == 0 else RAISED
        elif reader in ready:  # it has closed its output and still runs
            watched = [process]
        if not how and time.monotonic() >= ends:
            how = TOO_LONG
    os.close(process)
    _end_all()
    return how, output[:most]


def _end_all() -> None:
    """Ends all processes but this one, which is the first of its namespace."""
    while True:
        try:
            os.kill(-1, signal.SIGKILL)
            os.waitpid(-1, os.WNOHANG)
        except (ProcessLookupError, ChildProcessError):
            return
        time.sleep(0.001)


if __name__ == "__main__":
    main()
