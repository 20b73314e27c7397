"""Runs Python code in a separate process, because it may crash, hang or leave something behind.

In: source and a time limit. Out: how it ended and what it printed. The process and its children are gone
afterwards.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass

LAST_LINES = 3
"""Number of lines of a failed process's output that are reported."""


@dataclass(frozen=True)
class ProcessResult:
    """Exit code and output of a process."""

    code: int | None
    """Exit code; negative: a signal; None: it timed out."""
    output: str
    """What it printed to stdout and stderr."""

    @property
    def last(self) -> str:
        """Its last lines, joined."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return " | ".join(lines[-LAST_LINES:])[-400:]

    @property
    def reason(self) -> str:
        """Why it failed, as text for a message."""
        if self.code is None:
            return "took too long"
        how = f"ended with signal {-self.code}" if self.code < 0 else f"exit code {self.code}"
        return f"{how}: {self.last}" if self.last else how


def run_python(source: str, *arguments: str, seconds: float) -> ProcessResult:
    """Runs Python source with this interpreter for at most `seconds`; `arguments` are its sys.argv[1:].
    Output goes to a file, because reading a pipe would wait for grandchildren that hold it."""
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            [sys.executable, "-c", source, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        return ProcessResult(code, printed.read().decode(errors="replace"))
