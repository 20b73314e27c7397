"""Programs that start a Ray of their own."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import forked
from jobs import command

TESTS = Path(__file__).parents[1]
FINDS_TESTS = "import os, sys; sys.path += os.environ['PYTHONPATH'].split(os.pathsep)\n"


def run(folder: Path, text: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """`text` as a program with these arguments and variables, in a process as `command.python` makes it.
    It and its workers find the modules of the tests."""
    (folder / "program.py").write_text(FINDS_TESTS + textwrap.dedent(text))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    server = forked.server(environ)
    environ |= {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]), **environment}
    words = (folder / "program.py", *words)
    return command.run(server, *map(str, words), cwd=folder, environ=environ, timeout=200)
