"""Inspects the weight files of a Hugging Face directory by their index and headers: which exist, what is
wrong with them, what they contain.

In: a directory. Out: faults in words, names and shapes. Only headers are read, so that a missing, truncated
or never downloaded shard is found in milliseconds instead of after minutes of loading. Left out on purpose:
whether the tensors fill a model (`fit.py`), and reading the weights."""

from __future__ import annotations

import json
import reprlib
import struct
import zipfile
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

import torch

from hydraflow.errors import ConfigError

SINGLE, PICKLE = "model.safetensors", "pytorch_model.bin"
INDEX, PICKLED_INDEX = f"{SINGLE}.index.json", f"{PICKLE}.index.json"
LFS = b"version https://git-lfs"
LARGEST_HEADER = 100 * 2**20
"""Largest header that safetensors allows."""
LARGEST_SIZE = 2**63
"""torch counts in signed 64-bit integers."""
SHOWN = 3
"""Maximum number of files or faults in a message."""


def read_weight_map(index: Path) -> dict[str, str]:
    """File by name of weight, from the index of a sharded model. Raises ConfigError for an invalid index, or
    one that names files outside of the directory; a file may be a link, as all are in the hub's cache."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError.one(str(index), None, f"cannot be read: {error}") from error
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict):
        raise ConfigError.one(str(index), None, "names no files: it has no weight_map")
    for weight, file in files.items():
        parts = PurePosixPath(file).parts if isinstance(file, str) and "\0" not in file else ()
        if not parts or parts[0] == "/" or ".." in parts:
            rule = f"says that {weight} is in {reprlib.repr(file)}, which is not a file of this directory"
            raise ConfigError.one(str(index), None, rule)
    return files


def weight_files(directory: Path) -> list[Path]:
    """The files that transformers loads; if it knows none of their names, all with weights, safetensors
    before pickles. ConfigError as in `files_to_load`."""
    unknown = (sorted(directory.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))
    return files_to_load(directory) or next(filter(None, unknown), [])


def weight_faults(directory: Path) -> list[str]:
    """Known reasons why the weights cannot be loaded; empty if there are none."""
    index = index_to_load(directory)
    if index is None:
        if not (files := weight_files(directory)):
            return ["this directory has no weights (*.safetensors or *.bin)"]
        return [fault for file in files if (fault := file_fault(file))]
    try:
        places = read_weight_map(index)
    except ConfigError as error:
        return [f"{index} {error.problems[0].rule}"]
    promised = sorted(set(places.values()))
    absent = [name for name in promised if not (directory / name).is_file()]
    if absent:
        lost = sum(shard in absent for shard in places.values())
        missing = f"{len(absent)} of {len(promised)} weight files are missing ({', '.join(absent[:SHOWN])})"
        return [f"{missing}, with {lost} of {len(places)} weights"]
    held: dict[str, list[str]] = {}
    for key, shard in places.items():
        held.setdefault(shard, []).append(key)
    return [fault for name in promised if (fault := file_fault(directory / name, held[name]))]


def file_fault(file: Path, names: Collection[str] = ()) -> str | None:
    """What is wrong with a weight file that must hold `names`; None if its header shows nothing wrong."""
    try:
        with file.open("rb") as opened:
            if opened.read(len(LFS)) == LFS:
                return f"{file.name} is a Git LFS pointer, not the file itself (git lfs pull)"
        if file.suffix != ".safetensors":
            return None if file.stat().st_size else f"{file.name} is empty"
        header = read_header(file)
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    if header is None:
        return f"{file.name} has no safetensors header: it is broken"
    described, start = header
    end = start + max((entry["data_offsets"][1] for entry in described.values()), default=0)
    if file.stat().st_size < end:
        return f"{file.name} is truncated: it has {file.stat().st_size} of {end} bytes"
    lost = sorted(set(names) - set(described))
    if not lost:
        return None
    return f"{file.name} lacks {len(lost)} weights that the index promises, the first {lost[0]}"


def read_header(file: Path) -> tuple[dict[str, Any], int] | None:
    """A safetensors header (dtype, shape, data_offsets by tensor), and the byte at which the data starts;
    None: not a safetensors file."""
    found = raw_header(file)
    return found if found is not None and all(map(_is_tensor, found[0].values())) else None


def raw_header(file: Path) -> tuple[dict[str, Any], int] | None:
    """As `read_header`, but what the header says of a tensor may be anything."""
    with file.open("rb") as opened:
        start = opened.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else LARGEST_HEADER + 1
        if size > LARGEST_HEADER:
            return None
        try:
            described = json.loads(opened.read(size))
        except (ValueError, RecursionError):
            return None
    if not isinstance(described, dict):
        return None
    described.pop("__metadata__", None)
    return described, 8 + size


def _is_tensor(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    offsets = entry.get("data_offsets")
    return _are_sizes(entry.get("shape")) and _are_sizes(offsets) and len(offsets) == 2


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < LARGEST_SIZE for value in values
    )


def stored_types(files: list[Path]) -> list[str]:
    """Dtypes in the first of these files, by safetensors' names; ["pickled"] if it is not safetensors."""
    header = read_header(files[0]) if files[0].suffix == ".safetensors" else None
    return sorted({entry["dtype"] for entry in header[0].values()}) if header else ["pickled"]


def files_to_load(directory: Path) -> list[Path]:
    """The files that transformers chooses to load; empty if it finds none under the names it knows.
    ConfigError for an index that names files elsewhere."""
    if (index := index_to_load(directory)) is not None:
        return [directory / name for name in sorted(set(read_weight_map(index).values()))]
    return [directory / single for single in (SINGLE, PICKLE) if (directory / single).is_file()][:1]


def index_to_load(directory: Path) -> Path | None:
    """The index that transformers follows; None: it loads a single file, or finds nothing. A single file goes
    before the index of shards."""
    for single, index in ((SINGLE, INDEX), (PICKLE, PICKLED_INDEX)):
        if (directory / single).is_file():
            return None
        if (directory / index).is_file():
            return directory / index
    return None


def stored_tensor(directory: Path, name: str) -> torch.Tensor | None:
    """One tensor of a directory's weights; None if there is no such name."""
    from safetensors import safe_open

    if (index := index_to_load(directory)) is not None:
        shard = read_weight_map(index).get(name)
        file = None if shard is None else directory / shard
    else:
        file = next(iter(files_to_load(directory)), None)
    if file is None or not file.is_file():
        return None
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(name) if name in set(opened.keys()) else None
    found = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)).get(name)
    return None if found is None else found.clone()


def empty_tensors(files: list[Path]) -> dict[str, torch.Tensor] | None:
    """The tensors of weight files without `weight_faults`, on the meta device; None: the shapes are unknown
    without loading them."""
    found: dict[str, torch.Tensor] = {}
    for file in files:
        if file.suffix != ".safetensors":
            tensors = _from_pickle(file)
        elif header := read_header(file):
            tensors = {name: torch.empty(one["shape"], device="meta") for name, one in header[0].items()}
        else:
            tensors = None
        if tensors is None:
            return None
        found |= tensors
    return found


def _from_pickle(file: Path) -> dict[str, torch.Tensor] | None:
    """The tensors of a zip archive, memory-mapped and read by torch's weights_only unpickler; None: not a zip
    archive, so its shapes cannot be read without loading it."""
    if not zipfile.is_zipfile(file):
        return None
    loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(loaded, dict):
        raise ValueError(f"{file.name} holds a {type(loaded).__name__}, not tensors by name")
    tensors = {str(name): value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    return {name: tensor.to("meta") for name, tensor in tensors.items()}
