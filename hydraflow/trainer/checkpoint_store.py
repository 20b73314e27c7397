"""The checkpoints in a run folder: started under a temporary name, completed, pointed to, pruned, and found
again.

In: parts that workers have written, and the controller's state. Out:

    latest_checkpointed_iteration.txt   the step to resume from; replaced last, atomically
    global_step_12/                     manifest.json (sizes, checksums), trainer.json, a folder for each role
    global_step_14.5f1c09be.unfinished/ being written, or left by an interrupted run; one for each attempt
    best/global_step_6/                 the best by a metric, and best/best.json with its value

A reader finds a complete checkpoint or none: files and folders are flushed before the rename, the rename
before the pointer. Left out on purpose: when to save (`checkpoint.py`), what a run state means (`resume.py`),
the state of a model (`engine/`).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydraflow.system.whole_files import flush, json_object, make_earlier, replace_folder, replacing
from hydraflow.workers.saving import PARTS, FileInfo, expect_part, file_facts

FORMAT = 1
POINTER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
RUN_STATE = "trainer.json"
BEST = "best"
UNFINISHED, DAMAGED = ".unfinished", ".damaged"
READERS = 8
"""Threads that compute checksums."""


class CheckpointStore:
    """The checkpoints of one run folder. One process at a time writes it."""

    def __init__(self, folder: Path):
        self.folder = folder

    # --- reading --------------------------------------------------

    def steps(self) -> list[int]:
        """Steps of the checkpoints that have their final name, ascending."""
        names = (path.name for path in self.folder.glob("global_step_*"))
        return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"global_step_(\d+)", name)))

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint, whether it exists or not."""
        return self.folder / f"global_step_{step}"

    def pointer(self) -> int | None:
        """The step that the pointer names; None if it is missing or unreadable."""
        try:
            return int((self.folder / POINTER).read_text())
        except (OSError, ValueError):
            return None

    def newest_whole(self, roles: Collection[str]) -> tuple[int | None, dict[int, str]]:
        """The step to resume from, and what is wrong with the candidates tried before it.

        The pointer's step is tried first, then the others from newest to oldest. None: no checkpoint is
        complete.
        """
        pointer = self.pointer()
        candidates = sorted(self.steps(), reverse=True)
        if pointer is not None and pointer in candidates:
            candidates = [pointer, *(step for step in candidates if step != pointer)]
        wrong: dict[int, str] = {}
        if pointer is not None and pointer not in candidates:
            wrong[pointer] = f"{POINTER} names it, but it does not exist"
        for step in candidates:
            if not (found := damage(self.path(step), roles)):
                return step, wrong
            wrong[step] = found
        return None, wrong

    def best(self) -> dict[str, Any] | None:
        """`metric`, `value` and `step` of the best checkpoint, if any."""
        return json_object(self.folder / BEST / "best.json")

    # --- writing --------------------------------------------------

    def begin(self, step: int, ranks: Mapping[str, int], state: Mapping[str, Any]) -> Path:
        """A folder for the parts of `ranks` ranks of each role, with the run's state in it. OSError when it
        cannot be made."""
        # unique: a rank of an earlier start, on a machine believed lost, may still be writing this step
        unfinished = self.path(step).with_name(f"{self.path(step).name}.{secrets.token_hex(4)}{UNFINISHED}")
        try:
            unfinished.mkdir(parents=True)
            for role, size in ranks.items():
                for rank in range(size):
                    expect_part(unfinished, role, rank)
            (unfinished / RUN_STATE).write_text(json.dumps(state, indent=2) + "\n")
        except OSError:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return unfinished

    def seal(self, unfinished: Path, step: int, files: Mapping[str, FileInfo]) -> None:
        """Completes the folder: writes the manifest, removes the parts, flushes everything. Only its final
        name is still missing."""
        files = {**files, RUN_STATE: file_facts(unfinished / RUN_STATE, flush=True)}
        shutil.rmtree(unfinished / PARTS)
        _write_manifest(unfinished, step, files)
        for folder in [unfinished, *(path for path in unfinished.rglob("*") if path.is_dir())]:
            flush(folder)

    def name(self, sealed: Path, step: int) -> Path:
        """Gives a sealed checkpoint its final name. Runs do not resume from it until the pointer names it."""
        _replace_folder(sealed, self.path(step))
        return self.path(step)

    def point_to(self, step: int | None) -> None:
        """Makes the next start resume from this step; None: from the newest checkpoint."""
        if step is None:
            (self.folder / POINTER).unlink(missing_ok=True)
        elif self.pointer() != step:
            write_whole(self.folder / POINTER, f"{step}\n")

    def publish_best(self, whole: Path, step: int, metric: str, value: float, *, linked: bool) -> None:
        """Keeps a complete checkpoint in best/, in place of the earlier best. `linked`: hard-link it, so that
        the regular checkpoint stays; otherwise move it."""
        target = self.folder / BEST / f"global_step_{step}"
        target.parent.mkdir(exist_ok=True)
        source = _linked_copy(whole, target.with_name(target.name + UNFINISHED)) if linked else whole
        _replace_folder(source, target)
        facts = {"metric": metric, "value": value, "step": step}
        write_whole(target.parent / "best.json", json.dumps(facts, indent=2) + "\n")
        for other in target.parent.iterdir():
            if other.is_dir() and other != target:
                shutil.rmtree(other)

    def thin_out(self, keep: Mapping[str, int | None]) -> None:
        """Removes each role's oldest parts until `keep` of them are left, and checkpoints that hold no role
        any more."""
        for role, most in keep.items():
            if most is None:
                continue
            holders = [step for step in self.steps() if (self.path(step) / role).is_dir()]
            for step in holders[:-most]:
                self._drop(step, role, keep)

    def _drop(self, step: int, role: str, roles: Iterable[str]) -> None:
        path = self.path(step)
        if not any((path / other).is_dir() for other in roles if other != role):
            # renamed first: no reader may find half of it
            shutil.rmtree(path.rename(path.with_name(f"{path.name}.old{UNFINISHED}")))
            return
        if (files := _manifest_of(path)) is not None:
            kept = {name: facts for name, facts in files.items() if not name.startswith(f"{role}/")}
            _write_manifest(path, step, kept)
        shutil.rmtree(path / role)

    # --- clean-up before a run resumes --------------------------------------------------

    def clear_leftovers(self) -> None:
        """Removes unfinished checkpoints of an interrupted run."""
        for pattern in (f"global_step_*{UNFINISHED}", f"{BEST}/*{UNFINISHED}"):
            for leftover in self.folder.glob(pattern):
                shutil.rmtree(leftover, ignore_errors=True)  # a rank believed lost may still write to it

    def set_aside(self, step: int, damaged: Collection[int]) -> list[Path]:
        """Renames the checkpoints that do not lead to `step`: damaged ones and newer ones. Returns the new
        paths."""
        moved, steps = [], self.steps()
        for other in steps:
            if other in damaged:
                moved.append(self.path(other).with_name(self.path(other).name + DAMAGED))
                _replace_folder(self.path(other), moved[-1])
        newer = [other for other in steps if other > step and other not in damaged]
        if newer:
            aside = make_earlier(self.folder)
            moved += [self.path(other).rename(aside / self.path(other).name) for other in newer]
        return moved


def damage(path: Path, roles: Collection[str]) -> str:
    """What is wrong with a checkpoint for a run with these roles; empty when every file has its size and
    checksum."""
    files = _manifest_of(path)
    if files is None:
        return f"{MANIFEST} is missing or cannot be read"
    if absent := [role for role in roles if not any(name.startswith(f"{role}/") for name in files)]:
        return f"holds no {', '.join(absent)}"
    for name, facts in files.items():
        try:
            size = (path / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if size != facts.bytes:
            return f"{name} has {size} bytes instead of {facts.bytes}"
    with ThreadPoolExecutor(READERS) as readers:
        return next(filter(None, readers.map(lambda name: _change(path, name, files[name]), files)), "")


def _change(path: Path, name: str, facts: FileInfo) -> str:
    """What is wrong with a file's content; empty when it is intact."""
    try:
        found = file_facts(path / name)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return "" if found == facts else f"{name} has changed: its checksum differs"


def _manifest_of(path: Path) -> dict[str, FileInfo] | None:
    """The files of a checkpoint; None without a readable manifest."""
    manifest = json_object(path / MANIFEST) or {}
    files = manifest.get("files")
    if manifest.get("format") != FORMAT or not isinstance(files, dict):
        return None
    try:
        return {name: FileInfo(**facts) for name, facts in files.items()}
    except TypeError:
        return None


def write_whole(path: Path, text: str) -> None:
    """Replaces a small file atomically and flushes it to disk."""
    with replacing(path) as unfinished, unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    flush(path.parent)


def _write_manifest(folder: Path, step: int, files: Mapping[str, FileInfo]) -> None:
    facts = {name: asdict(files[name]) for name in sorted(files)}
    manifest = {"format": FORMAT, "step": step, "files": facts}
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def _replace_folder(source: Path, target: Path) -> None:
    replace_folder(source, target)
    flush(target.parent)


def _linked_copy(source: Path, target: Path) -> Path:
    """The same files in another folder, or copies where the file system has no hard links. Linking is safe
    because no file of a checkpoint is changed in place."""
    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(source, target, copy_function=os.link)
    except (OSError, shutil.Error):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
    return target
