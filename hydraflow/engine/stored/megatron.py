"""Reads checkpoints that Megatron-Core itself wrote (`dist_checkpointing`, format torch_dist), as saved by
Megatron-LM, slime, verl and NeMo: `.metadata`, `metadata.json`, `common.pt`, `__0_0.distcp` in one folder.

In: that folder, or a parent. Out: a `Checkpoint` with Megatron-Core's own tensors. Nothing is unpickled: the
index is read into inert records (`engine/dcp_index.py`), and `common.pt` is not opened. Left out on purpose:
optimizer states, which are counted but not read; Hugging Face's names (`engine/megatron/saved_names.py`);
what our own Megatron engine saves, which are Hugging Face tensors (`model_merger/dcp.py`).
"""

from __future__ import annotations

import re
from pathlib import Path

from hydraflow.engine.dcp_index import read_index
from hydraflow.engine.stored.checkpoint import Checkpoint, counted, read_json
from hydraflow.errors import ConfigError
from hydraflow.system.paths import core_checkpoint_problems, expanded

CONFIG, COMMON, BACKEND = "metadata.json", "common.pt", "torch_dist"
POINTER = "latest_checkpointed_iteration.txt"
"""File in a run's folder that names its latest iteration or step."""
UNFINISHED = ".unfinished"
"""Suffix of a save that was interrupted."""
RELEASE = "release"
"""Folder of a converted model, used instead of an iteration's."""
_ITERATION = re.compile(r"iter_(\d+)")
_WITHIN = ("dist_ckpt", "model/dist_ckpt", "weights")
"""Subfolders in which verl, older versions of verl, and NeMo keep the files."""
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
EXTRA = "_extra_state"
"""Suffix of a module's extra state (for FP8)."""


def iteration(content: str) -> str:
    """The folder that the latest-iteration file names.

    >>> iteration("10"), iteration("release")
    ('iter_0000010', 'release')
    """
    return f"iter_{int(content):07d}" if content.isdecimal() else content


def iterations(run: Path) -> list[Path]:
    """The folders of a run's iterations, oldest first; a converted model's folder comes before them."""
    found = [(int(one[1]), path) for path in run.iterdir() if (one := _ITERATION.fullmatch(path.name))]
    release = run / RELEASE
    converted = [release] if release.is_dir() and folder_of(release) else []
    return [*converted, *(path for _, path in sorted(found))]


def latest_directory(path: Path, *, field: str) -> Path:
    """The directory of a run's latest iteration or step if `path` is a run's folder; otherwise `path` itself.
    `field`: the key or flag that names the path. Raises ConfigError when it is missing or unfinished."""
    if not path.is_dir():
        raise ConfigError.one(field, str(path), "there is no such directory")
    if (path / POINTER).is_file():
        path = _latest(path, field)
    elif found := iterations(path):
        path = found[-1]
    if any(part.endswith(UNFINISHED) for part in path.absolute().parts):
        rule = f"a directory named *{UNFINISHED} is a save that was interrupted"
        raise ConfigError.one(field, str(path), rule)
    return path


def _latest(run: Path, field: str) -> Path:
    content = (run / POINTER).read_text(encoding="utf-8").strip()
    for step in (run / f"global_step_{content}", run / iteration(content)):
        if step.is_dir() and (content.isdecimal() or content == RELEASE):
            return step
    rule = f"there is neither global_step_{content} nor {iteration(content)} beside it"
    raise ConfigError.one(
        str(run / POINTER), content, rule, f"name the folder of one of its steps in {field}"
    )


def folder_of(directory: Path) -> Path | None:
    """The folder with the files in a model's directory (the index may be missing); None: it has none. Raises
    ConfigError for Megatron's older format."""
    for folder in (directory, *(directory / within for within in _WITHIN)):
        known = folder.name == "dist_ckpt" or "sharded_backend" in read_json(folder / CONFIG)
        if folder.is_dir() and (known or (folder / COMMON).is_file()):
            return folder
    if any(directory.glob("mp_rank_*")):
        rule = "holds one file per rank (mp_rank_*), Megatron's older format, which cannot be read"
        raise ConfigError.one(str(directory), None, rule, "save it with Megatron's --ckpt-format torch_dist")
    return None


def find(path: Path, *, field: str) -> Checkpoint:
    """The checkpoint in a directory, or a run's latest. Raises ConfigError that names `field` when there is
    none."""
    if problems := core_checkpoint_problems(str(path), field):
        raise ConfigError(problems)
    directory = latest_directory(expanded(path), field=field)
    if folder_of(directory) is None:
        rule = "is not one model's checkpoint: it holds several models, or has an unknown layout"
        inside = [str(one) for one in sorted(directory.iterdir()) if one.is_dir() and folder_of(one)]
        remedy = " or ".join(f"{field}={one}" for one in inside)
        raise ConfigError.one(field, str(path), rule, remedy or f"{field}=<the folder with {COMMON}>")
    return read(directory)


def read(directory: Path) -> Checkpoint:
    """The checkpoint in a model's directory. Raises ConfigError when the index cannot be read."""
    folder = folder_of(directory)
    assert folder is not None, "callers check it with folder_of"
    about = read_json(folder / CONFIG)
    if (backend := about.get("sharded_backend", BACKEND)) != BACKEND:
        file = f"{folder / CONFIG}: sharded_backend"
        raise ConfigError.one(file, backend, f"only {BACKEND} can be read", f"save it as {BACKEND}")
    index = read_index(folder, ".")
    optimizer = {key: tensor for key, tensor in index.tensors.items() if _OPTIMIZER.match(key)}
    tensors = {key: one for key, one in index.tensors.items() if key not in optimizer and EXTRA not in key}
    if not tensors:
        raise ConfigError.one(str(folder), None, "holds no weights")
    entries = [("optimizer", tensor.stored_bytes) for tensor in optimizer.values()]
    for key, size in index.objects.items():
        part = "optimizer" if _OPTIMIZER.match(key) else re.split(r"[./]", key)[0]
        entries.append((EXTRA.strip("_") if EXTRA in key else part, size))
    found = Checkpoint(directory, "megatron", index.last_writer + 1, tensors, others=counted(entries))
    found.problems = [*index.missing_parts(tensors.values())]
    # folders that may hold Hugging Face's files; Megatron-LM writes none
    places = (place / "huggingface" for place in (folder, directory, directory.parent))
    found.settings = next((path for path in places if path.is_dir()), None)
    return found
