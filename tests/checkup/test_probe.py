"""Python in processes of its own, ended for good."""

from __future__ import annotations

import time
from pathlib import Path

from hydraflow.checkup.probe import run_python


def test_what_it_prints_and_how_it_ends() -> None:
    ended = run_python("import sys; print(sys.argv[1]); sys.exit(3)", "hello", seconds=20)
    assert (ended.code, ended.last, ended.reason) == (3, "hello", "exit code 3: hello")


def test_a_signal() -> None:
    assert (
        run_python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", seconds=20).reason
        == "ended with signal 11"
    )


def lives(process: int) -> bool:
    """Whether it has not ended; one that nobody has asked for its exit code yet has."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_its_children_end_with_it(tmp_path: Path) -> None:
    began = time.monotonic()
    source = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); open(sys.argv[1],"
        " 'w').write(str(p.pid)); time.sleep(60)"
    )
    ended = run_python(source, str(tmp_path / "pid"), seconds=2)
    assert ended.code is None and ended.reason == "took too long"
    assert time.monotonic() - began < 20
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5  # on a busy machine the kernel takes a moment to end it
    while lives(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not lives(child)
