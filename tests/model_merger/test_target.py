"""The directory that a command makes: what is replaced, copied and left alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from model_merger.directories import merge, read

from hydraflow.errors import EnvironmentFault
from hydraflow.model_merger.__main__ import main

Refused = Callable[..., str]


def merging(split: Callable[..., Path], target: Path) -> list[str]:
    return ["merge", "--local_dir", str(split("hydraflow")), "--target_dir", str(target)]


def test_a_target_that_is_there_is_not_touched(
    split: Callable[..., Path], refused: Refused, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine.txt").write_text("keep")
    command = ("merge", "--local_dir", split("hydraflow"), "--target_dir", target)
    assert "already exists, and is not a model's directory" in refused(*command, "--overwrite")
    (target / "config.json").write_text("{}")
    assert "already exists\n      -> --overwrite" in refused(*command)
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["config.json", "mine.txt", "out"]
    assert main([*map(str, command), "--overwrite"]) == 0
    assert not (target / "mine.txt").exists() and (target / "model.safetensors").is_file()
    assert not list(tmp_path.glob("out.*"))


def test_an_empty_target_is_filled_where_it_is(
    split: Callable[..., Path], refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a mount point, which cannot be renamed, or in a folder that is not the user's."""
    target = tmp_path / "out"
    target.mkdir()
    node = target.stat().st_ino
    command = merging(split, target)
    assert main(command) == 0
    assert target.stat().st_ino == node and not list(tmp_path.glob("out.*"))
    assert (target / "config.json").is_file() and not list(target.glob("*unfinished"))
    monkeypatch.setattr(Path, "is_mount", lambda self: self == target)
    assert "is a mount point, which cannot be replaced" in refused(*command, "--overwrite")


def test_an_empty_target_is_empty_again_after_a_failure(
    split: Callable[..., Path], refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    (target / "lost+found").mkdir(parents=True)  # a new file system
    command = merging(split, target)
    whole = Path.rename

    def rename(self: Path, to: Path) -> Path:
        if to == target / "config.json":
            raise OSError(5, "Input/output error")
        return whole(self, to)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        assert main(command) == EnvironmentFault.exit_code
    assert [path.name for path in target.iterdir()] == ["lost+found"]
    (target / "out.1234.unfinished").mkdir()  # of a process that was killed
    assert f"rm -r {target / 'out.1234.unfinished'}" in refused(*command)
    (target / "out.1234.unfinished").rmdir()
    assert main(command) == 0


def test_further_chat_templates_are_copied(split: Callable[..., Path], tmp_path: Path) -> None:
    source = shutil.copytree(split("hydraflow"), tmp_path / "source")
    templates = source / "huggingface" / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("{{ messages }}")
    assert main(["merge", "--local_dir", str(source), "--target_dir", str(tmp_path / "out")]) == 0
    merged = tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja"
    assert merged.read_text() == "{{ messages }}"


def test_a_tilde_is_the_home_folder(
    split: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(split("hydraflow"), tmp_path / "source")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["merge", "--local_dir=~/source", "--target_dir=~/out"]) == 0
    assert main(["test", "--local_dir=~/source", "--test_hf_dir=~/out"]) == 0
    assert main(["info", "--local_dir=~/source"]) == 0


def test_only_what_it_made_is_removed(split: Callable[..., Path], tmp_path: Path) -> None:
    """Folders beside the target may be the user's, whatever their names."""
    mine = [tmp_path / name / "mine.txt" for name in ("out.old", "out.unfinished")]
    for file in mine:
        file.parent.mkdir()
        file.write_text("keep")
    for _ in range(2):
        assert main([*merging(split, tmp_path / "out"), "--overwrite"]) == 0
    assert [file.read_text() for file in mine] == ["keep", "keep"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.old", "out.unfinished"]


def test_an_earlier_model_stays_when_the_new_one_cannot_take_its_place(
    split: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*merging(split, tmp_path / "out"), "--overwrite"]
    assert main(command) == 0
    before = read(tmp_path / "out")
    whole = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name.endswith(".unfinished"):
            raise OSError(5, "Input/output error")
        return whole(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    assert main(command) == EnvironmentFault.exit_code
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and read(
        tmp_path / "out"
    ).keys() == before.keys()


@pytest.mark.parametrize("link", ["file", "folder"])
def test_links_out_of_a_checkpoint_are_not_published(
    broken: Callable[[str], Path], refused: Refused, tmp_path: Path, link: str
) -> None:
    checkpoint, private = broken("hydraflow"), tmp_path / "private"
    if link == "file":
        private.mkdir()
        (private / "id_rsa").write_text("secret")
        (checkpoint / "huggingface" / "notes.txt").symlink_to(private / "id_rsa")
    else:
        (checkpoint / "huggingface").rename(private)
        (checkpoint / "huggingface").symlink_to(private)
    reported = refused(
        "merge", "--local_dir", checkpoint, "--target_dir", tmp_path / "out", target=tmp_path / "out"
    )
    assert (
        f"{checkpoint}/huggingface/{'notes.txt' if link == 'file' else 'config.json'}: is a link to"
        f" {private}/" in reported
    )


def test_links_within_a_checkpoint_are_copied_as_what_they_stand_for(
    broken: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = broken("hydraflow")
    (checkpoint / "notes.txt").write_text("mine")
    (checkpoint / "huggingface" / "notes.txt").symlink_to("../notes.txt")
    merge(checkpoint, tmp_path / "out")
    assert (
        not (tmp_path / "out" / "notes.txt").is_symlink()
        and (tmp_path / "out" / "notes.txt").read_text() == "mine"
    )


def test_a_model_in_the_hubs_cache_is_split(models: dict[str, str], tmp_path: Path) -> None:
    """It is made of links to files elsewhere."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    shutil.copytree(models["tied"], tmp_path / "blobs")
    for file in (tmp_path / "blobs").iterdir():
        (snapshot / file.name).symlink_to(file)
    assert (
        main(
            [
                "split",
                "--hf_dir",
                str(snapshot),
                "--target_dir",
                str(tmp_path / "checkpoint"),
                "--world_size",
                "2",
            ]
        )
        == 0
    )
    assert not any(path.is_symlink() for path in (tmp_path / "checkpoint").rglob("*"))
    assert main(["test", "--local_dir", str(tmp_path / "checkpoint"), "--test_hf_dir", str(snapshot)]) == 0


@pytest.mark.parametrize("target", ["checkpoint", "checkpoint/huggingface", "."])
def test_a_target_that_holds_what_is_read(
    broken: Callable[[str], Path], refused: Refused, tmp_path: Path, target: str
) -> None:
    checkpoint = broken("hydraflow")
    before = sorted(tmp_path.rglob("*"))
    reported = refused("merge", "--local_dir", checkpoint, "--target_dir", tmp_path / target, "--overwrite")
    assert f"contains the directory to read: {checkpoint}/huggingface" in reported
    assert "contains the directory to read" in refused(
        "split",
        "--hf_dir",
        checkpoint / "huggingface",
        "--target_dir",
        checkpoint,
        "--world_size",
        1,
        "--overwrite",
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_a_target_that_cannot_be_made(split: Callable[..., Path], refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be created: Not a directory" in refused(
        "merge", "--local_dir", split("verl"), "--target_dir", tmp_path / "file" / "out"
    )
