"""The server that runs the commands of the tests: what one caller leaves half done is not the next one's."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import forked
import psutil
import pytest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two modules to run, and a process of the tests that has not started a server."""
    (tmp_path / "sleeps.py").write_text("import time\nprint('asleep', flush=True)\ntime.sleep(60)\n")
    (tmp_path / "ends.py").write_text("import sys\nprint(sys.argv[1])\nsys.exit(3)\n")
    monkeypatch.setattr(forked, "STARTED", [])
    return tmp_path


@pytest.fixture
def server(home: Path) -> Iterator[forked.Server]:
    server = forked.Server(dict(os.environ), preloads=False)
    forked.STARTED.append(server)
    yield server
    if server in forked.STARTED:
        server.stop()


def run(
    server: forked.Server, home: Path, *words: str, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    return server.run("-m", *words, cwd=home, environ=dict(os.environ), timeout=timeout)


def test_commands_in_a_row(server: forked.Server, home: Path) -> None:
    for word in ("one", "two"):
        done = run(server, home, "ends", word)
        assert (done.returncode, done.stdout, done.stderr) == (3, f"{word}\n", "")
    done = server.run(str(home / "ends.py"), "three", cwd=home.parent, environ=dict(os.environ), timeout=60)
    assert (done.returncode, done.stdout) == (3, "three\n"), "a file"
    assert [server] == forked.STARTED


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, pytest.fail.Exception])
def test_an_interrupted_exchange_leaves_no_answer_and_no_process(
    server: forked.Server, home: Path, monkeypatch: pytest.MonkeyPatch, interrupt: type[BaseException]
) -> None:
    """As Ctrl-C and pytest-timeout do it, after the first of the two answers."""
    wait_for = server._answer
    found: list[psutil.Process] = []

    def answer(what: str) -> int:
        if what == "code":
            raise interrupt("while the command runs")
        found.append(psutil.Process(wait_for(what)))
        return found[0].pid

    monkeypatch.setattr(server, "_answer", answer)
    with pytest.raises(interrupt):
        run(server, home, "sleeps")
    assert forked.STARTED == [], "the next command starts a server"
    assert not psutil.wait_procs(found, timeout=10)[1]


def test_a_command_that_takes_too_long_is_killed(server: forked.Server, home: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        run(server, home, "sleeps", timeout=1)
    assert caught.value.stdout == "asleep\n" and forked.STARTED == []


def test_an_answer_about_another_command_is_noticed(server: forked.Server) -> None:
    server._answers = io.StringIO('{"command": 0, "code": 7}\n')  # type: ignore[assignment]
    server._commands = 1
    with pytest.raises(AssertionError):
        server._answer("code")


def test_a_changed_environment_gets_a_server_of_its_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third time in a row, or where it is needed; else it gets no server at all."""
    monkeypatch.setattr(forked, "ASKED", [])
    made: list[forked.Server] = []

    class Server(forked.Server):
        def __init__(self, environ: dict[str, str]) -> None:
            super().__init__(environ, preloads=False)
            made.append(self)

    monkeypatch.setattr(forked, "Server", Server)
    usual, other = dict(os.environ), {**os.environ, "HF_HOME": "/elsewhere"}
    later = {**usual, "RAY_ADDRESS": "here", "COLUMNS": "80"}
    first = forked.server(usual)
    assert forked.server(later) is first, "no library reads them while it is imported"
    assert forked.server(other) is None and forked.server(usual) is first
    assert forked.server(other) is None and forked.server(other) is None
    second = forked.server(other)
    assert second is not None and made == [first, second] and [second] == forked.STARTED
    assert run(second, home, "ends", "one").returncode == 3
    third = forked.needed_server(usual)
    assert forked.needed_server(later) is third and [third] == forked.STARTED
    third.abandon()


@pytest.mark.slow
def test_a_command_uses_the_token_that_a_ray_of_the_tests_has_switched_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray reads its mode when its library is loaded, which is before the fork."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    (tmp_path / "mode.py").write_text(
        "from ray._raylet import get_authentication_mode as mode\nprint(mode())\n"
    )
    server = forked.needed_server(dict(os.environ))
    environ = {**os.environ, "RAY_AUTH_MODE": "token"}
    done = server.run("-m", "mode", cwd=tmp_path, environ=environ, timeout=60)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert forked.server({**os.environ, "RAY_AUTH_MODE": "disabled"}) is None
