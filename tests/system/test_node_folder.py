"""The user's folder on this machine, and where Ray's sessions are."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hydraflow.errors import ConfigError, EnvironmentFault
from hydraflow.system.node_folder import (
    KEPT_DAYS,
    LONGEST_SOCKET,
    REMOVED_AT_ONCE,
    SESSIONS,
    SOCKET,
    remove_old_sessions,
    session_folder,
)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room to choose a length."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="h") as folder:
        yield Path(folder)


def test_without_room_below_tmpdir_sessions_are_below_tmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert session_folder() == Path(f"/tmp/hydraflow-{os.getuid()}/ray")


def test_a_closed_folder_of_the_users_needs_no_other_one_in_it(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has room for sockets, and none for one more folder."""
    scratch = short / "x".ljust(LONGEST_SOCKET - len(SOCKET) - len(f"{short}//{SESSIONS}"), "x")
    scratch.mkdir(mode=0o700)
    monkeypatch.setenv("RAY_TMPDIR", str(scratch))
    assert session_folder() == scratch / SESSIONS
    scratch.chmod(0o755)
    with pytest.raises(
        ConfigError, match=r"RAY_TMPDIR=.* is too long .* or \d+ for a folder of yours with mode 700"
    ):
        session_folder()
    assert list(scratch.iterdir()) == []


def test_a_path_that_no_socket_can_have(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = short / ("long" * 20)
    scratch.mkdir(mode=0o700)
    monkeypatch.setenv("RAY_TMPDIR", str(scratch))
    with pytest.raises(ConfigError, match="is too long for the sockets below it"):
        session_folder()


def test_the_variable_that_counts_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/nothing-here")
    with pytest.raises(EnvironmentFault, match="cannot be made: No such file or directory; set RAY_TMPDIR="):
        session_folder()


def session(folder: Path, name: str, *, written_days_ago: float) -> Path:
    """What a Ray leaves that began long ago, and last wrote to its logs then."""
    found = folder / name
    (found / "logs").mkdir(parents=True)
    (found / "logs" / "raylet.out").write_text("")
    long_ago = time.time() - 10 * KEPT_DAYS * 86400
    os.utime(found, (long_ago, long_ago))
    last = time.time() - written_days_ago * 86400
    os.utime(found / "logs" / "raylet.out", (last, last))
    return found


def test_sessions_that_ended_long_ago_are_removed_and_no_other(tmp_path: Path) -> None:
    old = session(tmp_path, "session_2026-01-01_00-00-00_1_1", written_days_ago=KEPT_DAYS + 1)
    runs = session(tmp_path, "session_2026-01-02_00-00-00_1_2", written_days_ago=0)
    recent = session(tmp_path, "session_2026-01-03_00-00-00_1_3", written_days_ago=KEPT_DAYS - 1)
    other = session(tmp_path, "mine", written_days_ago=KEPT_DAYS + 1)
    (tmp_path / "session_latest").symlink_to(recent)
    remove_old_sessions(tmp_path)
    assert not old.exists() and runs.exists() and recent.exists() and other.exists()


def test_only_a_few_are_removed_at_once(tmp_path: Path) -> None:
    for number in range(REMOVED_AT_ONCE + 3):
        session(tmp_path, f"session_2026-01-01_{number:02}", written_days_ago=KEPT_DAYS + 1)
    remove_old_sessions(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    remove_old_sessions(tmp_path / "is not there")
