"""Standard streams that outlive their readers."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, time
from pathlib import Path
from hydraflow.system.logging_setup import outlive_readers
outlive_readers()
outlive_readers()  # a run that goes on after a failure sets itself up again
print("one ü", flush=True)
Path("said").touch()
while not Path("left").exists():
    time.sleep(0.01)
print("two", flush=True)
print("three" * 100_000)
print("four", file=sys.stderr, flush=True)
Path("done").touch()
"""


def test_a_reader_that_leaves_ends_nothing(tmp_path: Path) -> None:
    words = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "one ü\n"
        running.stdout.close()
        (tmp_path / "left").touch()
        assert running.wait(30) == 0
    assert (tmp_path / "done").exists()


def test_a_reader_that_stays_gets_everything(tmp_path: Path) -> None:
    (tmp_path / "left").touch()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "four\n")
    assert done.stdout == "one ü\ntwo\n" + "three" * 100_000 + "\n"


def test_a_socket_whose_other_end_is_closed_ends_nothing(tmp_path: Path) -> None:
    """As of ssh without a terminal."""
    mine, theirs = socket.socketpair()
    words = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(words, cwd=tmp_path, stdout=theirs, stderr=theirs) as running:
        theirs.close()
        assert mine.recv(100).decode() == "one ü\n"
        mine.close()
        (tmp_path / "left").touch()
        assert running.wait(30) == 0
    assert (tmp_path / "done").exists()
