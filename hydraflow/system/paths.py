"""Checks the paths of a configuration: that data files and model folders exist, that outputs can be written.

In: paths as the user wrote them. Out: problems, worded the same for every command. `os.path` asks, because
`Path` raises for a folder that may not be entered and for a name that is too long. Standard library only, so
that missing files are reported together with all other mistakes, before any large import. Left out on
purpose: the files' contents, which their readers check.
"""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydraflow.errors import ConfigError, Problem
from hydraflow.system.whole_files import prove_writable

PARQUET_ENDING, JSON_ENDINGS = ".parquet", (".jsonl", ".json")
DATA_ENDINGS = (PARQUET_ENDING, *JSON_ENDINGS)
_SUGGESTED = 3
"""Largest number of a folder's files that a message names."""


def expanded(path: str | Path) -> Path:
    """The path with `~` replaced. Where there is no such home folder it stays, and `Path.expanduser` would
    raise."""
    return Path(os.path.expanduser(path))


def require_home(path: str, key: str) -> None:
    """Raises ConfigError for the `~` of an unknown user: a folder of that name would be made here."""
    if str(expanded(path)).startswith("~"):
        raise ConfigError.one(key, path, "that home folder is not known", f"{key}=<a path without ~>")


def listed(files: Any) -> list[Path] | None:
    """A path or a list of them as a list, `~` replaced; None if it is neither.

    >>> listed("a.parquet"), listed([]), listed(3)
    ([PosixPath('a.parquet')], None, None)
    """
    names = [files] if isinstance(files, str | Path) else files
    if not isinstance(names, Sequence) or not names:
        return None
    if not all(isinstance(name, str | Path) for name in names):
        return None
    return [expanded(name) for name in names]


def file_problems(files: Any, key: str) -> list[Problem]:
    """Problems of `files`, the path or list of paths in `key`: one for each that is not a file on this
    machine."""
    paths = listed(files)
    if paths is None:
        rule = "must be a Parquet or JSONL file, or a list of them"
        return [Problem(key, files, rule, f"{key}=/path/to/file.parquet")]
    problems = [no_file(path, key) for path in paths if not os.path.isfile(path)]
    if len(paths) > 1:  # a remedy with one file would drop the others
        problems = [replace(one, remedy=one.remedy.replace(f"{key}=", "")) for one in problems]
    return problems


def no_file(path: Path, key: str, *, endings: Sequence[str] = DATA_ENDINGS, after: str = "") -> Problem:
    """The problem of a path in `key` that is not a file, with what is there instead. endings: of files to
    suggest; after: what follows the path in the value."""
    if os.path.isdir(path):
        rule, files = "is a folder, not a file", sorted(_files_in(path, endings))
        meant = [f"{key}={path}/<file>{after}"]
    else:
        folder, meant = path.absolute().parent, [f"{key}=<a file>{after}"]
        if os.path.isdir(folder):
            rule = f"no such file in {folder}"
        else:
            rule = f"no such file: {folder} " + (
                "is not a folder" if os.path.exists(folder) else "does not exist"
            )
        names = [file.name for file in _files_in(folder, endings)]
        files = [path.with_name(name) for name in difflib.get_close_matches(path.name, names, _SUGGESTED)]
    meant = [shlex.quote(f"{key}={file}{after}") for file in files[:_SUGGESTED]] or meant
    return Problem(key, f"{path}{after}", rule, " or ".join(meant))


def _files_in(folder: Path, endings: Sequence[str]) -> list[Path]:
    try:
        return [file for file in folder.iterdir() if file.suffix in endings and os.path.isfile(file)]
    except OSError:  # it is not a folder, or cannot be read
        return []


def require_writable(path: str | None, key: str) -> None:
    """Raises ConfigError when the file in `key`, if any, cannot be written; leaves nothing behind."""
    if path is None:
        return
    require_home(path, key)
    target = expanded(path)
    try:
        if os.path.isdir(target):
            raise IsADirectoryError(None, "it is a folder")
        prove_writable(target.absolute().parent)
    except OSError as error:
        raise unwritable(path, key, error) from error


def unwritable(path: str, key: str, error: OSError) -> ConfigError:
    """The message that the file in `key` cannot be written."""
    rule = f"cannot be written ({error.strerror})"
    return ConfigError.one(key, path, rule, f"{key}=<a file you may write>")


def is_hub_name(path: str) -> bool:
    """Whether a model's path is a name on the Hugging Face hub rather than a folder.

    >>> is_hub_name("Qwen/Qwen3-8B"), is_hub_name("/models/qwen"), is_hub_name("models/qwen/8b")
    (True, False, False)
    """
    return (
        bool(path)
        and path.count("/") <= 1
        and not path.startswith(("/", ".", "~"))
        and not os.path.exists(path)
    )


def model_problems(path: str, key: str) -> list[Problem]:
    """Problems of the model path in `key`: no such folder, or no model in it."""
    if is_hub_name(path):
        return []
    folder = expanded(path)
    if not os.path.exists(folder):
        return [Problem(key, path, "there is no such directory", f"{key}=<Hugging Face directory>")]
    if not os.path.isdir(folder):
        return [Problem(key, path, "is a file, not a directory", f"{key}={folder.parent}")]
    if not os.path.isfile(folder / "config.json"):
        if writer := _sharded_by(folder):
            rule = f"holds a checkpoint of {writer}, which must be merged first"
            merge = f"python -m hydraflow.model_merger merge --local_dir {path} --target_dir MERGED"
            if not _holds(folder, "huggingface/config.json"):  # Megatron-LM saves none
                merge += " --hf_model_path <Hugging Face directory of that model>"
            return [Problem(key, path, rule, f"{merge}, then {key}=MERGED")]
        rule = "this directory has no config.json, so it is not a Hugging Face model"
        inside = sorted(str(file.parent) for file in folder.glob("*/config.json"))
        return [Problem(key, path, rule, f"{key}={inside[0] if inside else '<directory with config.json>'}")]
    return []


def core_checkpoint_problems(path: str, key: str) -> list[Problem]:
    """Problems of the path of a Megatron-Core checkpoint in `key`: no such folder, or no checkpoint in it."""
    folder = expanded(path)
    if not os.path.isdir(folder):
        rule = "is a file, not a directory" if os.path.exists(folder) else "there is no such directory"
        return [Problem(key, path, rule, f"{key}=<checkpoint of Megatron-Core>")]
    if _sharded_by(folder) == CORE:
        return []
    rule = "holds no checkpoint that Megatron-Core wrote: there is no common.pt in it"
    remedy = f"{key}=<folder with .metadata, common.pt and *.distcp>"
    if os.path.isfile(folder / "config.json"):
        remedy = f"use_dist_checkpointing=false in that section, and {path} as the path of the model"
    return [Problem(key, path, rule, remedy)]


CORE = "Megatron-Core"
_SHARDED = {
    CORE: ("common.pt", "mp_rank_*"),
    "several ranks": ("checkpoint.json", "model_world_size_*_rank_*.pt"),
}
"""Writer -> files of its sharded checkpoints."""
_PLACES = [
    f"{model}{place}"
    for model in ("", "actor/", "global_step_*/*/")
    for place in ("", "dist_ckpt/", "model/dist_ckpt/", "weights/", "iter_*/", "release/")
]
"""Folders that may hold the files, below a model's, a step's or a run's folder."""


def _holds(folder: Path, *names: str) -> bool:
    """Whether a sharded checkpoint in a folder or below it has a file of one of these names."""
    return any(next(folder.glob(f"{place}{name}"), None) for place in _PLACES for name in names)


def _sharded_by(folder: Path) -> str | None:
    """The writer of a sharded checkpoint in a folder or below it; None: there is none."""
    return next((writer for writer, marks in _SHARDED.items() if _holds(folder, *marks)), None)
