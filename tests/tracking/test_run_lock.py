"""Two runs in one folder: the second is refused, with the name of the first. A killed owner does not keep the
folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hydraflow.errors import ConfigError
from hydraflow.tracking.run_lock import LOCK_FILE, RunLock, is_at_work

HOLD = """
import sys, time
from pathlib import Path
from hydraflow.tracking.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_the_second_is_refused_and_a_killed_owner_lets_go(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "held\n"
    with pytest.raises(ConfigError) as caught:
        RunLock(tmp_path)
    assert caught.value.exit_code == 2
    assert f"process {owner.pid} on {socket.gethostname()}" in str(caught.value)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    lock = RunLock(tmp_path)
    assert f'"pid": {os.getpid()}' in (tmp_path / LOCK_FILE).read_text()
    lock.release()
    lock.release()
    RunLock(tmp_path).release()


NO_LOCKS = [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP]


@pytest.fixture(params=NO_LOCKS, ids=lambda number: errno.errorcode[number])
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What flock says on a file system that has none; such a one cannot be mounted here."""

    def refuse(file: int, how: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)


def write_owner(folder: Path, **facts: object) -> None:
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "user": "ada", "since": "2026-01-01T00:00:00"}
    (folder / LOCK_FILE).write_text(json.dumps(owner | facts))


@pytest.mark.usefixtures("no_locks")
class TestWithoutLocks:
    def test_a_run_starts_with_a_warning_and_takes_its_name_away(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        lock = RunLock(tmp_path)
        assert "this file system has no locks" in caplog.text
        assert is_at_work(tmp_path)
        lock.release()
        lock.release()
        assert not list(tmp_path.iterdir())

    def test_a_process_that_lives_keeps_the_folder(self, tmp_path: Path) -> None:
        owner = RunLock(tmp_path)
        with pytest.raises(ConfigError, match=f"(?s)process {os.getpid()} on .* once that run has ended"):
            RunLock(tmp_path)
        owner.release()
        RunLock(tmp_path).release()

    def test_a_dead_one_does_not(self, tmp_path: Path) -> None:
        dead = subprocess.Popen(["true"])
        dead.wait()
        write_owner(tmp_path, pid=dead.pid)
        RunLock(tmp_path).release()

    def test_nor_one_whose_number_another_process_has_now(self, tmp_path: Path) -> None:
        write_owner(tmp_path, start_ticks=1)
        assert is_at_work(tmp_path) is False
        RunLock(tmp_path).release()

    def test_of_another_machine_nobody_knows(self, tmp_path: Path) -> None:
        write_owner(tmp_path, host="elsewhere")
        with pytest.raises(
            ConfigError, match=r"(?s)of ada, since 2026.*or rm .*\.lock once that run has ended"
        ) as caught:
            RunLock(tmp_path)
        assert caught.value.exit_code == 2


@pytest.mark.parametrize("content", ["[1]", "null", "7", '{"pid": 1}', "", "{", '{"pid": "x", "host": []}'])
def test_a_lock_file_of_another_kind_names_nobody(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK_FILE).write_text(content)
    assert is_at_work(tmp_path) is None
    held = (tmp_path / LOCK_FILE).open()
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="a process that has not identified itself"):
        RunLock(tmp_path)
    held.close()
    RunLock(tmp_path).release()


def test_a_lock_file_that_cannot_be_written(tmp_path: Path) -> None:
    """As another user's; a folder stands for it, which not even root can write."""
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(ConfigError, match=r"\.lock in it cannot be written \(Is a directory\)") as caught:
        RunLock(tmp_path)
    assert caught.value.exit_code == 2
