"""The entry point `dummy_entry.py` in this process, for tests of what it says. A process of its own takes
longer and says the same (`test_command_line.py` has both)."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from compose.dummy_entry import SCHEMAS, run

from hydraflow.compose.launch import launch
from hydraflow.compose.loading import EntryPoint


def call(folder: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python tests/compose/dummy_entry.py name arguments` in that folder, with what it printed."""
    out, err = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
    argv = ["dummy_entry.py", *arguments]
    here = chdir(folder), patch.dict(os.environ), patch.object(sys, "argv", argv)
    with ExitStack() as stack:
        for one in (*here, redirect_stdout(out), redirect_stderr(err)):
            stack.enter_context(one)
        code = launch(EntryPoint(name, SCHEMAS[name]), run)
    said = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(argv, code, *said)
