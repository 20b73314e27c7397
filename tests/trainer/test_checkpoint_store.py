"""The checkpoints of a run folder: whole or not there, found again, thinned out. The parts are written here
as workers write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from hydraflow.trainer.checkpoint_store import MANIFEST, POINTER, CheckpointStore, damage
from hydraflow.workers.saving import file_facts, read_part, save_part

RANKS = {"actor": 2, "critic": 1}


class Written:
    """A snapshot of a few bytes."""

    def __init__(self, content: bytes):
        self.content = content

    def write(self, directory: Path) -> list[Path]:
        path = directory / f"{self.content.decode()}.bin"
        path.write_bytes(self.content * 1000)
        return [path]


class Broken:
    """A snapshot on a full disk."""

    def write(self, directory: Path) -> list[Path]:
        (directory / "half").write_bytes(b"1")
        raise OSError(28, "No space left on device")


def save(store: CheckpointStore, step: int, ranks: Mapping[str, int] = RANKS, *, point: bool = True) -> Path:
    unfinished = store.begin(step, ranks, {"step": step})
    files = {}
    for role, size in ranks.items():
        for rank in range(size):
            assert read_part(unfinished, role, rank) is None, "not yet"
            save_part(Written(f"{role}{rank}".encode()), unfinished, role, rank, background=False)
            part = read_part(unfinished, role, rank)
            assert part is not None and not part.error
            files |= part.files
    store.seal(unfinished, step, files)
    store.name(unfinished, step)
    if point:
        store.point_to(step)
    return store.path(step)


def test_a_checkpoint_is_what_its_manifest_says(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path), 3)
    assert path == tmp_path / "global_step_3"
    assert (tmp_path / POINTER).read_text() == "3\n"
    manifest = json.loads((path / MANIFEST).read_text())
    assert manifest["step"] == 3 and manifest["format"] == 1
    assert sorted(manifest["files"]) == [
        "actor/actor0.bin",
        "actor/actor1.bin",
        "critic/critic0.bin",
        "trainer.json",
    ]
    assert manifest["files"]["actor/actor0.bin"]["bytes"] == 6000
    on_disk = {str(found.relative_to(path)) for found in path.rglob("*") if found.is_file()}
    assert on_disk == {*manifest["files"], MANIFEST}, "nothing else is left in it"
    assert damage(path, ["actor", "critic"]) == ""


def test_a_checksum_is_that_of_zip_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"123456789")
    assert file_facts(tmp_path / "file").crc32 == "cbf43926", "the check value of CRC-32"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4321] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda path: cut(path / "actor" / "actor1.bin"), "actor/actor1.bin has 5999 bytes instead of 6000"),
        (
            lambda path: flip_a_bit(path / "critic" / "critic0.bin"),
            "critic/critic0.bin has changed: its checksum differs",
        ),
        (lambda path: (path / "actor" / "actor0.bin").unlink(), "actor/actor0.bin is missing"),
        (lambda path: (path / MANIFEST).write_text("{"), f"{MANIFEST} is missing or cannot be read"),
        (
            lambda path: (path / MANIFEST).write_text('{"format": 1}'),
            f"{MANIFEST} is missing or cannot be read",
        ),
        (
            lambda path: (path / MANIFEST).write_text('{"format": 1, "files": {"a": {"bites": 1}}}'),
            f"{MANIFEST} is missing or cannot be read",
        ),
        (lambda path: (path / "trainer.json").write_text("{}\n"), "trainer.json has 3 bytes instead of 16"),
    ],
    ids=["cut", "bit", "missing", "manifest", "no files", "no facts", "state"],
)
def test_damage_is_found_and_the_newest_whole_one_is_taken(
    tmp_path: Path, spoil: Callable[[Path], None], complaint: str
) -> None:
    store = CheckpointStore(tmp_path)
    for step in (2, 4, 6):
        save(store, step)
    spoil(store.path(6))
    assert store.newest_whole(["actor", "critic"]) == (4, {6: complaint})


def test_the_pointer_goes_first_in_line(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.newest_whole(["actor"]) == (None, {})
    for step in (2, 4, 6):
        save(store, step)
    store.point_to(4)
    assert store.newest_whole(["actor"]) == (4, {}), "someone wants to go back"
    (tmp_path / POINTER).unlink()
    assert store.newest_whole(["actor"]) == (6, {})
    (tmp_path / POINTER).write_text("8\n")
    assert store.newest_whole(["actor"]) == (6, {8: f"{POINTER} names it, but it does not exist"})


def test_one_that_lacks_a_role_is_not_enough(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 2, {"actor": 1})
    assert store.newest_whole(["actor"]) == (2, {})
    assert store.newest_whole(["actor", "critic"]) == (None, {2: "holds no critic"})


def test_a_part_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    unfinished = CheckpointStore(tmp_path).begin(2, RANKS, {})
    save_part(Broken(), unfinished, "actor", 1, background=False)
    part = read_part(unfinished, "actor", 1)
    assert part is not None and part.error == "actor rank 1: [Errno 28] No space left on device"
    assert read_part(unfinished, "actor", 0) is None


def test_a_rank_that_cannot_even_say_so_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished = CheckpointStore(tmp_path).begin(2, RANKS, {})

    def full(self: Path, text: str) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    save_part(Broken(), unfinished, "actor", 1, background=False)
    with pytest.raises(FileNotFoundError, match="left no report"):
        read_part(unfinished, "actor", 1)


@pytest.mark.parametrize(
    "report", ["", "{", "null", "[]", '{"files": 1, "error": ""}', '{"files": {"a": {}}, "error": ""}']
)
def test_a_report_that_is_none(tmp_path: Path, report: str) -> None:
    unfinished = CheckpointStore(tmp_path).begin(2, RANKS, {})
    (unfinished / "parts" / "actor-1.json").write_text(report)
    with pytest.raises(ValueError):
        read_part(unfinished, "actor", 1)


def test_two_attempts_at_a_step_do_not_mix(tmp_path: Path) -> None:
    """A rank of the first one, on a machine that was taken for lost, writes still."""
    first = CheckpointStore(tmp_path).begin(2, RANKS, {})
    CheckpointStore(tmp_path).clear_leftovers()
    second = CheckpointStore(tmp_path).begin(2, RANKS, {})
    (first / "actor").mkdir(parents=True)
    save_part(Written(b"late"), first, "actor", 1, background=False)
    assert read_part(second, "actor", 1) is None and not list((second / "actor").iterdir())
    store = CheckpointStore(tmp_path)
    save(store, 2)
    assert damage(store.path(2), ["actor", "critic"]) == ""
    store.clear_leftovers()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_2", POINTER]


def test_the_oldest_go_also_those_of_an_earlier_start(tmp_path: Path) -> None:
    for step in (2, 4):
        save(CheckpointStore(tmp_path), step)
    store = CheckpointStore(tmp_path)
    save(store, 6)
    store.thin_out({"actor": 2, "critic": 2})
    assert store.steps() == [4, 6]
    assert not list(tmp_path.glob("*.unfinished"))


def test_each_role_has_a_limit_of_its_own(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (2, 4, 6, 8):
        save(store, step)
        store.thin_out({"actor": 3, "critic": 1})
    assert store.steps() == [4, 6, 8]
    assert damage(store.path(6), ["actor"]) == "", "what is left of it is whole"
    assert damage(store.path(6), ["actor", "critic"]) == "holds no critic"
    assert damage(store.path(8), ["actor", "critic"]) == ""
    store.thin_out({"actor": None, "critic": None})
    assert store.steps() == [4, 6, 8]


def test_the_best_is_kept_apart_and_shares_its_files(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.best() is None
    store.publish_best(save(store, 2), 2, "val-core/x/acc/mean@1", 0.25, linked=True)
    store.publish_best(save(store, 4), 4, "val-core/x/acc/mean@1", 0.5, linked=True)
    assert store.best() == {"metric": "val-core/x/acc/mean@1", "value": 0.5, "step": 4}
    assert [path.name for path in (tmp_path / "best").iterdir() if path.is_dir()] == ["global_step_4"]
    best = tmp_path / "best" / "global_step_4"
    assert (best / "actor" / "actor0.bin").samefile(store.path(4) / "actor" / "actor0.bin")
    save(store, 6)
    store.thin_out({"actor": 1, "critic": 1})
    assert store.steps() == [6]
    assert damage(best, ["actor", "critic"]) == "", "it stays when the other name goes"


def test_going_back_sets_newer_ones_aside_and_names_damaged_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (2, 4, 6, 8):
        save(store, step)
    store.begin(10, RANKS, {})
    store.clear_leftovers()
    moved = store.set_aside(4, damaged=[6])
    assert [str(path.relative_to(tmp_path)) for path in moved] == [
        "global_step_6.damaged",
        "earlier-1/global_step_8",
    ]
    assert store.steps() == [2, 4]
    assert not list(tmp_path.glob("*.unfinished"))
    save(store, 6)
    assert store.newest_whole(RANKS) == (6, {}), "the name of a damaged one can be used again"
