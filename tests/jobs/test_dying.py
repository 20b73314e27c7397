"""What tests of killed processes look for in shared memory is found where it is."""

from __future__ import annotations

from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from jobs.dying import left_in_memory, shared_files


def test_a_file_in_shared_memory_is_noted_and_missed_once_it_is_gone(tmp_path: Path) -> None:
    shared = SharedMemory(create=True, size=4096)
    try:
        (tmp_path / "process 1").write_text(shared_files())
        assert f"/dev/shm/{shared.name.strip('/')}" in left_in_memory(tmp_path)
    finally:
        shared.close()
        shared.unlink()
    assert left_in_memory(tmp_path) == []
