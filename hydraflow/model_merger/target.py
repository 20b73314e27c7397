"""The directory that a command creates: written under a temporary name, and renamed once it is complete, or
moved up into a directory that was there and empty. And its configuration files.

In: a directory's name, the checkpoint's `huggingface/`. Out: that directory, or nothing.
Left out on purpose: weights.
"""

from __future__ import annotations

import errno
import json
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hydraflow.engine.stored.checkpoint import read_json
from hydraflow.engine.stored.megatron import UNFINISHED
from hydraflow.errors import ConfigError, EnvironmentFault, Problem
from hydraflow.memory.report import size_text
from hydraflow.model_merger.architecture import Architecture
from hydraflow.system.whole_files import flush

_INDICES = (".safetensors.index.json", ".bin.index.json")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", *_INDICES)
_MARKS = ("config.json", "huggingface")
"""Every directory that these commands create has one of these; a directory without any is never replaced."""
_TEMPLATES = "additional_chat_templates"
"""Where transformers keeps a tokenizer's templates besides the default one."""
_DTYPE_KEYS = ("dtype", "torch_dtype")


@contextmanager
def unfinished(target: Path, source: Path, *, nbytes: int, overwrite: bool) -> Iterator[Path]:
    """A directory to write into, whose content is `target`'s at the end, or which is removed on any failure.
    `source`: the directory that is read. Raises ConfigError when `target` cannot be made or replaced or the
    disk has less than `nbytes` left, EnvironmentFault when something goes wrong on the disk later."""
    target = require_free(target, source, overwrite=overwrite)
    _require_space(target, nbytes)
    own = f"{target.name}.{secrets.token_hex(4)}"  # a random name, so that nothing of the user's is removed
    # an empty directory is filled where it is: it may be a mount point, or in a folder that is not the user's
    is_empty = target.is_dir() and _is_empty(target)
    folder = (target if is_empty else target.parent) / f"{own}{UNFINISHED}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise _refusal(target, f"cannot be created: {error.strerror}") from error
    try:
        yield folder
        for path in [*folder.rglob("*"), folder]:  # on disk before the rename, even if the machine crashes
            flush(path)
        if is_empty:
            _move_up(folder)
        else:
            _replace(folder, target, target.with_name(f"{own}.old"))
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        text = f"{target}: {'the disk is full' if full else error}; nothing was left there"
        raise EnvironmentFault(text) from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def settings(source: Path) -> list[Path]:
    """Configuration, tokenizer, chat templates and code: every file but weights."""
    files = [*sorted(source.iterdir()), *sorted(source.glob(f"{_TEMPLATES}/*.jinja"))]
    return [file for file in files if file.is_file() and not file.name.endswith(_WEIGHTS)]


def copy_settings(files: Iterable[Path], folder: Path) -> None:
    """Copies files, and the targets of links among them."""
    for file in files:
        place = folder / _TEMPLATES if file.parent.name == _TEMPLATES else folder
        place.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place / file.name)


def require_inside(files: Iterable[Path], directory: Path) -> None:
    """Raises ConfigError for links out of the directory: their targets may be private, but a merged model may
    be published. In the hub's cache a repository's files are links to its own blobs."""
    problems = []
    inside = [directory.resolve()]
    for above in directory.absolute().parents:
        if (above / "blobs").is_dir() and (above / "snapshots").is_dir():
            inside.append(above.resolve() / "blobs")
            break
    for file in files:
        if not any(file.resolve().is_relative_to(folder) for folder in inside):
            rule = f"is a link to {file.resolve()}, outside of the checkpoint, and would be copied"
            problems.append(Problem(str(file), None, rule, f"rm {file}, or put a copy in its place"))
    if problems:
        raise ConfigError(problems)


def write_config(source: Path, folder: Path, found: Architecture, dtype: torch.dtype) -> None:
    """Writes config.json, adjusted to the merged weights: class, dtype, ties, number of labels."""
    config = read_json(source / "config.json")
    _set_dtype(config, str(dtype).removeprefix("torch."))
    if found.retied is not None:
        config["tie_word_embeddings"] = found.retied
    if found.class_name not in (config.get("architectures") or ()):
        config["architectures"] = [found.class_name] if found.class_name else None
    if found.head == "value":
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        config["token_classification_bias"] = "score.bias" in found.shapes
    write_json(folder / "config.json", config)


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """An object as readable JSON."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _set_dtype(config: dict[str, Any], name: str) -> None:
    for key in [key for key in _DTYPE_KEYS if key in config] or ["dtype"]:
        config[key] = name
    for key, part in config.items():
        is_part = key.endswith("_config") and key != "quantization_config" and isinstance(part, dict)
        if is_part and any(part.get(inner) for inner in _DTYPE_KEYS):
            _set_dtype(part, name)


def require_free(target: Path, source: Path, *, overwrite: bool) -> Path:
    """The target's absolute path. Raises ConfigError if it must not be written or replaced."""
    target, source, another = target.resolve(), source.resolve(), "another --target_dir"
    if target.exists() and not target.is_dir():
        raise _refusal(target, "is a file")
    if target == source or target in source.parents:
        raise _refusal(target, f"contains the directory to read: {source}", another)
    if not target.is_dir() or _is_empty(target):
        return target
    if left := [path for path in target.iterdir() if _is_left(path, target)]:
        raise _refusal(target, "holds what an interrupted command left", f"rm -r {left[0]}")
    if target.is_mount():
        raise _refusal(target, "is a mount point, which cannot be replaced", "a directory in it")
    if not any((target / name).exists() for name in _MARKS):
        raise _refusal(target, "already exists, and is not a model's directory", another)
    if not overwrite:
        raise _refusal(target, "already exists", f"--overwrite, or {another}")
    return target


def _refusal(target: Path, rule: str, remedy: str = "") -> ConfigError:
    return ConfigError.one("--target_dir", str(target), rule, remedy)


def _is_left(path: Path, target: Path) -> bool:
    """Whether `unfinished` made this path in the target."""
    return path.name.startswith(f"{target.name}.") and path.name.endswith(UNFINISHED)


def _is_empty(target: Path) -> bool:
    """Whether nothing is there but what a new file system has."""
    return all(path.name == "lost+found" for path in target.iterdir())


def _require_space(target: Path, nbytes: int) -> None:
    existing = next(folder for folder in (target, *target.parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if free < nbytes:
        rule = f"{size_text(nbytes)} are to be written, but {existing} has {size_text(free)} left"
        raise _refusal(target, rule, "--target_dir <folder on a larger disk>")


def _move_up(folder: Path) -> None:
    """Moves everything in a directory to the one above, what marks a model's directory last; nothing on any
    failure."""
    moved: list[Path] = []
    try:
        for path in sorted(folder.iterdir(), key=lambda path: path.name in _MARKS):
            moved.append(path.rename(folder.parent / path.name))
    except BaseException:
        for path in moved:
            path.rename(folder / path.name)
        raise
    folder.rmdir()


def _replace(folder: Path, target: Path, old: Path) -> None:
    """Renames the directory to `target`; a previous one is renamed to `old` first, and removed afterwards."""
    if not target.exists():
        folder.rename(target)
        return
    target.rename(old)
    try:
        folder.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
