"""The user's folder on this machine, and where Ray's sessions are."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hydraflow.errors import ConfigError, EnvironmentFault
from hydraflow.system.node_folder import LONGEST_SOCKET, SESSIONS, SOCKET, session_folder


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
