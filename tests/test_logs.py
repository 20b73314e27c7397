"""python -m hydraflow.logs: one stream of all roles and ranks, what is chosen of it, and following a run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydraflow import logs
from hydraflow.dispatch.config import LogConfig
from hydraflow.system.role_logs import LogSettings, RoleLogs


def line(second: int, level: str, who: str, text: str) -> str:
    return f"2026-01-01T00:00:{second:02d}.000Z {level} {who} {text}\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two ranks of an actor, one of which has two files, and a controller."""
    folder = tmp_path / "run" / "logs"
    folder.mkdir(parents=True)
    (folder / "actor-0.log.1").write_text(line(1, "INFO", "actor-0", "begins"))
    (folder / "actor-0.log").write_text(
        line(4, "WARNING", "actor-0", "slow")
        + "  because of\n  the disk\n"
        + line(6, "INFO", "actor-0", "ends")
    )
    (folder / "actor-1.log").write_text(
        "written before any tag\n"
        + line(2, "OUT", "actor-1", "printed")
        + line(5, "ERROR", "actor-1", "broken")
    )
    (folder / "controller-0.log").write_text(line(3, "DEBUG", "controller-0", "thinks"))
    (folder / "notes.txt").write_text("no log\n")
    return tmp_path / "run"


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> list[str]:
    assert logs.main(list(arguments)) == code
    out, err = capsys.readouterr()
    return (err if code else out).splitlines()


def texts(shown: list[str]) -> list[str]:
    return [text.split(" ", 3)[3] if text.startswith("2026") else text.strip() for text in shown]


def test_all_of_it_in_the_order_of_time(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = texts(said(capsys, str(run)))
    assert shown[0].endswith("written before any tag")
    assert shown[1:] == ["begins", "printed", "thinks", "slow", "because of", "the disk", "broken", "ends"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--role", "actor", "--rank", "1", "--level", "info"],
            ["OUT actor-1 written before any tag", "printed", "broken"],
        ),
        (["--rank", "0"], ["begins", "thinks", "slow", "because of", "the disk", "ends"]),
        (
            ["--role", "controller", "--role", "actor", "--level", "warning"],
            ["slow", "because of", "the disk", "broken"],
        ),
        (["--grep", "d[ie]sk"], ["slow", "because of", "the disk"]),
        (["--grep", "^2026.*actor-0 b"], ["begins"]),
        (["--lines", "2"], ["broken", "ends"]),
        (["-n", "0"], []),
    ],
)
def test_what_is_chosen(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: list[str]
) -> None:
    assert texts(said(capsys, str(run), *arguments)) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--role", "critic"], "--role=critic: no such role in this run"),
        (["--rank", "7"], "-> --rank 0 to --rank 1"),
        (["--grep", "("], "not a regular expression"),
        (["--lines", "-1"], "must be at least 0"),
        (["--grep", "a{99999999999}"], "not a regular expression"),
    ],
)
def test_what_is_not_there_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert words in "\n".join(said(capsys, str(run), *arguments, code=2))


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no logs/ in it" in said(capsys, str(tmp_path), code=2)[0]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 59)), max_size=60))
def test_merging_keeps_every_line_and_the_order_of_each_file(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, int]]
) -> None:
    """Whatever the times: files are in order of time, as processes write them."""
    folder = tmp_path_factory.mktemp("logs")
    for rank in range(4):
        seconds = sorted(second for of, second in events if of == rank)
        (folder / f"actor-{rank}.log").write_text(
            "".join(line(s, "INFO", f"actor-{rank}", f"{n}") for n, s in enumerate(seconds))
        )
    read = list(logs.read(folder, [], []))
    assert [record.time for record in read] == sorted(record.time for record in read) and len(read) == len(
        events
    )
    for rank in range(4):
        assert [int(record.text) for record in read if record.rank == rank] == list(
            range(sum(of == rank for of, _ in events))
        )


def test_it_answers_at_once_and_imports_nothing_large(run: Path) -> None:
    program = (
        "import sys; from hydraflow import logs; logs.main(sys.argv[1:]); print(*(sys.modules.keys() &"
        " {'torch', 'ray', 'hydra', 'numpy'}))"
    )
    since = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, str(run), "-n", "0"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "" and time.monotonic() - since < 5


def test_following_a_run_to_its_end(tmp_path: Path) -> None:
    """Files that appear, grow, are moved; the end of the run ends it."""
    folder = tmp_path / "logs"
    written = RoleLogs(LogSettings(str(folder), LogConfig(max_megabytes=300 / 2**20, keep=9)), 0, "actor")
    written.line("INFO", "there before")
    command = [sys.executable, "-m", "hydraflow.logs", str(tmp_path), "--follow", "--grep", "number|there"]
    follower = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert follower.stdout is not None and follower.stdout.readline().endswith("there before\n")
    late = RoleLogs(LogSettings(str(folder)), 1, "actor")
    for number in range(40):
        (late if number % 2 else written).line("INFO", f"number {number}")
        written.line("INFO", "left out")
        time.sleep(0.02)
    (tmp_path / "summary.json").write_text("{}")
    said, _ = follower.communicate(timeout=30)
    assert follower.returncode == 0
    assert sorted(int(text.split()[-1]) for text in said.splitlines()) == list(range(40))
    assert len(list(folder.glob("actor-0.log.*"))) > 3


def owned(run: Path, pid: int) -> None:
    (run / ".lock").write_text(
        json.dumps({"pid": pid, "host": socket.gethostname(), "user": "me", "since": "now"})
    )


def summary(run: Path, why: str) -> None:
    (run / "summary.json").write_text(json.dumps({"why_it_ended": why, "steps": 3}))


def test_when_a_run_has_ended(run: Path) -> None:
    """A failure is no end while the process lives, for it may begin again; a process that was killed writes
    no summary."""
    assert not logs.has_ended(run), "nobody knows"
    owned(run, os.getpid())
    assert not logs.has_ended(run)
    summary(run, "actor rank 0 on node a failed in update: the process died")
    assert not logs.has_ended(run)
    summary(run, "SIGTERM received")
    assert logs.has_ended(run)
    (run / "summary.json").unlink()
    gone = subprocess.Popen(["true"])
    gone.wait()
    owned(run, gone.pid)
    assert logs.has_ended(run)


def test_following_a_run_that_is_killed(run: Path) -> None:
    worker = subprocess.Popen(["sleep", "100"])
    owned(run, worker.pid)
    command = [sys.executable, "-m", "hydraflow.logs", str(run), "--follow", "-n", "1"]
    follower = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert follower.stdout is not None and follower.stdout.readline().endswith("ends\n")
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    assert follower.communicate(timeout=30)[0] == "" and follower.returncode == 0


def test_following_a_role_that_has_not_written_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As right after the start of a run; and its folder is moved meanwhile, as when it starts from
    scratch."""
    folder = tmp_path / "logs"
    folder.mkdir()
    owned(tmp_path, os.getpid())

    def write() -> None:
        folder.rename(tmp_path / "aside")
        time.sleep(0.5)
        RoleLogs(LogSettings(str(folder)), 0, "actor").line("INFO", "at last")
        summary(tmp_path, "all steps done")

    late = threading.Timer(0.5, write)
    late.start()
    assert logs.main([str(tmp_path), "--follow", "--role", "actor", "--rank", "0"]) == 0
    late.join()
    out, err = capsys.readouterr()
    assert (
        out.endswith("INFO actor-0 at last\n")
        and err == "--role=actor: no such role in this run yet; waiting for it\n"
    )


@pytest.mark.parametrize("asked", [["--role", "actor"], ["--rank", "0"]])
def test_a_run_in_which_nobody_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: list[str]
) -> None:
    (tmp_path / "logs").mkdir()
    assert said(capsys, str(tmp_path)) == []
    assert "no line has been written yet" in "\n".join(said(capsys, str(tmp_path), *asked, code=2))


def test_a_file_that_got_the_inode_of_one_that_is_gone_is_read_from_its_beginning(tmp_path: Path) -> None:
    """File systems give the number of a deleted file to the next one, and rotation deletes a file right
    before it makes one."""
    file = tmp_path / "actor-0.log"
    file.write_text(line(1, "INFO", "actor-0", "a long line of the file that goes"))
    follower = logs.LogFollower(tmp_path, [], [])
    assert len(follower.new()) == 1
    file.write_text(line(2, "INFO", "actor-0", "new"))  # the same inode
    assert [record.text for record in follower.new()] == ["new"]


def test_an_unfinished_last_line_is_shown_once_the_run_has_ended(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (run / "logs" / "actor-0.log").open("a") as file:
        file.write(line(7, "ERROR", "actor-0", "last words").rstrip("\n"))
    summary(run, "all steps done")
    assert texts(said(capsys, str(run), "-f"))[-1] == "last words"


def test_what_continues_a_record_is_shown_with_it(tmp_path: Path) -> None:
    file, follower = tmp_path / "actor-0.log", logs.LogFollower(tmp_path, [], [])
    accepts = logs.record_filter("failed", None)

    def shown() -> list[str]:
        return [record.text for record in filter(accepts, follower.new())]

    file.write_text(line(1, "ERROR", "actor-0", "failed badly"))
    assert shown() == ["failed badly"]
    with file.open("a") as more:
        more.write("Traceback\n")
    assert shown() == ["Traceback"]
    with file.open("a") as more:
        more.write(line(2, "INFO", "actor-0", "goes on") + "calmly\n")
    assert shown() == []
    with file.open("a") as more:
        more.write("and failed after all\n")
    assert shown() == ["and failed after all"], "it matches by itself"


def test_arguments_without_an_end(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(said(capsys, str(run), "-n", "9" * 30)) == len(said(capsys, str(run)))
    assert "no logs/ in it" in said(capsys, "x" * 300, code=2)[0]
    assert "no logs/ in it" in said(capsys, "~nobody-of-this-name/run", code=2)[0]
