"""A file is replaced whole or stays as it was, and a folder is proven without a trace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hydraflow.system.whole_files import prove_writable, replacing


def test_it_is_there_when_the_block_has_ended_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text("old")
    with replacing(path) as unfinished:
        unfinished.write_text("new")
        assert path.read_text() == "old" and unfinished.parent == tmp_path
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file.json"]


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text("old")
    with pytest.raises(OSError, match="full"), replacing(path) as unfinished:
        unfinished.write_text("half")
        raise OSError("full")
    with pytest.raises(FileNotFoundError), replacing(path):
        pass  # nothing was written
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file.json"]


def test_a_folder_that_can_be_made(tmp_path: Path) -> None:
    prove_writable(tmp_path / "deep" / "folder")
    assert os.listdir(tmp_path) == []


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        prove_writable(tmp_path / "file" / "folder")
