"""Reads checkpoints that Megatron-Core itself wrote (`dist_checkpointing`, format torch_dist), as Megatron-LM
and slime, verl and NeMo save them: `.metadata`, `metadata.json`, `common.pt`, `__0_0.distcp` in one folder.

In: that folder, or a parent. Out: a `Checkpoint` with Megatron-Core's own tensors. Nothing is unpickled: the
index is read into inert records (`engine/dcp_index.py`), and `common.pt` is not opened. Left out on purpose:
optimizer states, which are counted but not read; Hugging Face's names (`engine/megatron/saved_names.py`);
what our own Megatron engine saves, which are Hugging Face tensors (`model_merger/dcp.py`).
"""

from __future__ import annotations

import re
from pathlib import Path

from hydraflow.engine.dcp_index import INDEX, Index, read_index
from hydraflow.engine.stored.checkpoint import Checkpoint, read_json
from hydraflow.engine.stored.pieces import StoredTensor
from hydraflow.engine.stored.shards import count, last_writer, missing_parts, stored
from hydraflow.errors import ConfigError

CONFIG, COMMON, BACKEND = "metadata.json", "common.pt", "torch_dist"
RELEASE = "release"
"""Folder of a converted model, used instead of an iteration's."""
_ITERATION = re.compile(r"iter_(\d+)")
_WITHIN = ("dist_ckpt", "model/dist_ckpt", "weights")
"""Subfolders with the files, of verl, older versions of verl, and NeMo."""
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
    """The iterations of a run, the oldest first; before them a converted model."""
    found = [(int(one[1]), path) for path in run.iterdir() if (one := _ITERATION.fullmatch(path.name))]
    release = run / RELEASE
    converted = [release] if release.is_dir() and folder_of(release) else []
    return [*converted, *(path for _, path in sorted(found))]


def folder_of(directory: Path) -> Path | None:
    """The folder with the files below a model's directory (the index may be missing); None: not such a
    directory. Raises ConfigError for Megatron's older format."""
    for folder in (directory, *(directory / within for within in _WITHIN)):
        known = folder.name == "dist_ckpt" or "sharded_backend" in read_json(folder / CONFIG)
        if folder.is_dir() and (known or (folder / COMMON).is_file()):
            return folder
    if any(directory.glob("mp_rank_*")):
        rule = "holds one file for each rank (mp_rank_*), Megatron's older format, which cannot be read"
        raise ConfigError.one(str(directory), None, rule, "save it with Megatron's --ckpt-format torch_dist")
    return None


def read(directory: Path) -> Checkpoint:
    """See the module. Raises ConfigError when the index cannot be read."""
    folder = folder_of(directory)
    assert folder is not None, "the caller has asked"
    about = read_json(folder / CONFIG)
    if (backend := about.get("sharded_backend", BACKEND)) != BACKEND:
        file = f"{folder / CONFIG}: sharded_backend"
        raise ConfigError.one(file, backend, f"only {BACKEND} can be read", f"save it as {BACKEND}")
    index = read_index(folder, ".")
    try:
        return _checkpoint(directory, folder, index)
    except (TypeError, ValueError) as error:  # pieces of other dimensions than their tensor
        raise ConfigError.one(str(folder / INDEX), None, f"is damaged: {error}") from error


def _checkpoint(directory: Path, folder: Path, index: Index) -> Checkpoint:
    tensors: dict[str, StoredTensor] = {}
    others: dict[str, tuple[int, int]] = {}
    for key, tensor in index.tensors.items():
        if _OPTIMIZER.match(key):
            count(others, "optimizer", sum(chunk.place.length for chunk in tensor.chunks))
        elif EXTRA not in key:
            tensors[key] = stored(key, tensor, folder)
    for key, size in index.objects.items():
        part = "optimizer" if _OPTIMIZER.match(key) else re.split(r"[./]", key)[0]
        count(others, EXTRA.strip("_") if EXTRA in key else part, size)
    if not tensors:
        raise ConfigError.one(str(folder), None, "holds no weights")
    found = Checkpoint(directory, "megatron", last_writer(index) + 1, tensors, others=others)
    found.problems = [*missing_parts(tensors.values(), index, folder)]
    found.settings = next((path for path in _settings(directory, folder) if path.is_dir()), None)
    return found


def _settings(directory: Path, folder: Path) -> list[Path]:
    """Folders that may hold Hugging Face's files. Megatron-LM writes none."""
    return [place / "huggingface" for place in dict.fromkeys((folder, directory, directory.parent))]
