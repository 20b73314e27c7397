"""Programs that start a Ray of their own."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import forked
from jobs import command

TESTS = Path(__file__).parents[1]
FINDABLE = {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
FINDS_TESTS = "import os, sys; sys.path += os.environ['PYTHONPATH'].split(os.pathsep)\n"
FORKS_WORKERS = """
from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.forked_template import fork_template
from hydraflow.trainer.config import RunConfig
fork_template(RayInitConfig(), RunConfig(device="cpu"))
"""
"""Before Ray is imported, as commands do."""


def run(folder: Path, text: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """`text` as a program with these arguments and variables, in a process as `command.python` makes it.
    It and its workers find the modules of the tests."""
    (folder / "program.py").write_text(FINDS_TESTS + textwrap.dedent(text))
    environ = without_ray()
    server = forked.server(environ | environment)
    words = (folder / "program.py", *words)
    environ |= FINDABLE | environment
    return command.run(server, *map(str, words), cwd=folder, environ=environ, timeout=200)


def start(folder: Path, text: str, *words: object, **environment: str) -> tuple[forked.Background, Path]:
    """The same in the background, in a session of its own, and the file `log` with all that it prints. It is
    a fork of a process that has imported the libraries and not Ray."""
    (folder / "program.py").write_text(FINDS_TESTS + textwrap.dedent(text))
    environ, log = without_ray(), folder / "log"
    server = forked.needed_server(environ)
    words = (folder / "program.py", *words)
    environ |= FINDABLE | environment
    return server.start(*map(str, words), cwd=folder, environ=environ, log=log), log


def without_ray() -> dict[str, str]:
    """The environment without what a Ray of the tests' own has set."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
