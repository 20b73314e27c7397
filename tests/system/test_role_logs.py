"""Log files of processes: tags, levels, rotation, several roles in one process, and what is printed or
written below Python."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from hydraflow.dispatch.config import LogConfig
from hydraflow.system.role_logs import LINE, LogSettings, RoleLogs, apply_level


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, given back as it was."""
    root, ours = logging.getLogger(), logging.getLogger("hydraflow")
    handlers, levels = root.handlers, (root.level, ours.level)
    root.handlers = []
    yield root
    root.handlers = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_a_line_says_when_who_and_how_bad(tmp_path: Path, root: logging.Logger) -> None:
    logs = RoleLogs(LogSettings(str(tmp_path)), 3, "actor")
    root.addHandler(logs)
    apply_level("info")
    logging.getLogger("hydraflow.workers").warning("step %d is skipped", 7)
    (line,) = lines(tmp_path / "actor-3.log")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT[\d:]{8}\.\d{3}Z WARNING actor-3 hydraflow\.workers: step 7 is skipped", line
    )
    assert LINE.fullmatch(line)


def test_the_file_is_that_of_the_role_whose_method_runs(tmp_path: Path, root: logging.Logger) -> None:
    logs = RoleLogs(LogSettings(str(tmp_path)), 0, "actor")
    root.addHandler(logs)
    apply_level("info")
    with logs.of("rollout"):
        logging.getLogger("hydraflow").info("of the rollout")
        with logs.of("actor"):
            logging.getLogger("hydraflow").info("of the actor")
    logging.getLogger("hydraflow").info("of the actor again")
    assert [line.partition("hydraflow: ")[2] for line in lines(tmp_path / "actor-0.log")] == [
        "of the actor",
        "of the actor again",
    ]
    assert [line.partition("hydraflow: ")[2] for line in lines(tmp_path / "rollout-0.log")] == [
        "of the rollout"
    ]


@pytest.mark.parametrize(
    ("level", "ours", "others"), [("debug", 5, 4), ("info", 4, 4), ("warning", 3, 3), ("error", 2, 2)]
)
def test_the_level_holds_for_ours_and_debug_not_for_others(
    tmp_path: Path, root: logging.Logger, level: str, ours: int, others: int
) -> None:
    root.addHandler(RoleLogs(LogSettings(str(tmp_path), LogConfig(level)), 0, "actor"))
    apply_level(level)
    for name in ("hydraflow.x", "somelibrary"):
        for number in (10, 20, 30, 40, 50):
            logging.getLogger(name).log(number, name)
    written = (tmp_path / "actor-0.log").read_text()
    assert (written.count("hydraflow.x: hydraflow.x"), written.count("somelibrary: somelibrary")) == (
        ours,
        others,
    )


def test_files_are_set_aside_at_their_size_and_the_oldest_goes(tmp_path: Path) -> None:
    logs = RoleLogs(LogSettings(str(tmp_path), LogConfig(max_megabytes=200 / 2**20, keep=2)), 0, "actor")
    for number in range(30):
        logs.line("INFO", f"{number:03d} {'x' * 40}")
    kept = {path.name: [line.split()[3] for line in lines(path)] for path in tmp_path.iterdir()}
    assert sorted(kept) == ["actor-0.log", "actor-0.log.1", "actor-0.log.2"]
    numbers = kept["actor-0.log.2"] + kept["actor-0.log.1"] + kept["actor-0.log"]
    assert numbers == [f"{number:03d}" for number in range(30 - len(numbers), 30)], (
        "in order, without a gap, up to the last"
    )
    assert all(path.stat().st_size < 200 + 100 for path in tmp_path.iterdir())


def test_an_exception_comes_with_its_stack_below_the_line(tmp_path: Path, root: logging.Logger) -> None:
    root.addHandler(RoleLogs(LogSettings(str(tmp_path)), 0, "critic"))
    try:
        raise ValueError("no good")
    except ValueError:
        logging.getLogger("hydraflow").exception("it failed")
    first, *below = lines(tmp_path / "critic-0.log")
    assert first.endswith("ERROR critic-0 hydraflow: it failed")
    assert below[0].startswith("Traceback") and below[-1] == "ValueError: no good"


CAPTURED = """
    import faulthandler, logging, os, subprocess, sys, warnings
    from hydraflow.dispatch.config import LogConfig
    from hydraflow.system.role_logs import LogSettings, RoleLogs, apply_level
    log = LogConfig(console="warning", max_megabytes=2000 / 2**20)
    logs = RoleLogs(LogSettings(sys.argv[1], log), 1, "actor")
    logging.getLogger().addHandler(logs)
    apply_level("info")
    logs.capture()
    print("printed", "words")
    print("held", end=" ", flush=True); print("together")
    sys.stdout.write("10%\\r50%\\r100%\\n")
    sys.stderr.buffer.write(b"from C\\n")
    subprocess.run(["echo", "of a child"])
    logging.getLogger("hydraflow").warning("a warning")
    with logs.of("rollout"):
        print("of the rollout, without an end", end="")
    with logs.of("rollout"):
        os.write(1, b"C code of the rollout\\n")
    for number in range(40):
        print("filler", number)
    os.write(2, b"after the file was moved\\n")
    faulthandler.enable()
    os.abort()
"""


def test_whatever_a_process_writes_is_in_its_files(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CAPTURED), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGABRT
    actor = [line for path in (tmp_path / "actor-1.log.1", tmp_path / "actor-1.log") for line in lines(path)]
    message = [line.split(" ", 3)[3] if LINE.fullmatch(line) else f"| {line}" for line in actor]
    assert message[:6] == [
        "printed words",
        "held together",
        "100%",
        "| from C",
        "| of a child",
        "hydraflow: a warning",
    ]
    assert actor[0].split()[1:3] == ["OUT", "actor-1"]
    assert "| after the file was moved" in message
    assert any("Fatal Python error: Aborted" in line for line in message), "what a crash leaves behind"
    rollout = lines(tmp_path / "rollout-1.log")
    assert (
        rollout[0].endswith("OUT rollout-1 of the rollout, without an end")
        and rollout[1] == "C code of the rollout"
    )
    assert (
        done.stderr.splitlines()[0].endswith("WARNING actor-1 hydraflow: a warning")
        and "printed" not in done.stderr
    )
    assert done.stdout == ""


def test_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = RoleLogs(LogSettings(str(tmp_path)), 0, "actor")

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    logs.line("ERROR", "lost")
    monkeypatch.undo()
    logs.line("ERROR", "there is room again")
    assert len(lines(tmp_path / "actor-0.log")) == 1


def test_a_file_that_cannot_be_set_aside_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No room for another file, or too many open: no line is lost, no older file, and nothing is written to a
    file of another user."""
    logs = RoleLogs(LogSettings(str(tmp_path), LogConfig(max_megabytes=100 / 2**20, keep=2)), 0, "actor")
    for number in range(4):
        logs.line("INFO", f"{number} {'x' * 60}")
    before = sorted(path.name for path in tmp_path.iterdir())

    def refused(*args: object, **kwargs: object) -> int:
        raise OSError(24, "Too many open files")

    opened = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "open", refused)
    for number in range(4, 8):
        logs.line("INFO", f"{number} {'x' * 60}")
    monkeypatch.undo()
    assert set(os.listdir("/proc/self/fd")) == opened, "the file is still open, and no other is"
    assert (
        sorted(path.name for path in tmp_path.iterdir())
        == before
        == ["actor-0.log", "actor-0.log.1", "actor-0.log.2"]
    )
    held = [text.split()[3] for name in reversed(before) for text in lines(tmp_path / name)]
    assert held[-5:] == ["3", "4", "5", "6", "7"]
    logs.line("INFO", "8")
    assert lines(tmp_path / "actor-0.log")[0].endswith(" 8"), "moved as soon as it can be"


def test_a_wrong_log_call_does_not_fail_its_caller(
    tmp_path: Path,
    root: logging.Logger,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", True)  # some libraries set it to False
    logs = RoleLogs(LogSettings(str(tmp_path)), 0, "actor")
    apply_level("info")
    for text in ("%d items", "after %s"):
        logs.emit(logging.LogRecord("hydraflow", logging.WARNING, __file__, 1, text, ("it",), None))
    assert [line.partition("hydraflow: ")[2] for line in lines(tmp_path / "actor-0.log")] == ["after it"]
    assert "TypeError: %d format" in capsys.readouterr().err  # as logging's own handlers say it
