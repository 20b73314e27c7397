"""Safetensors files: locates the tensors of a Hugging Face directory, and writes such a directory in shards,
a tensor at a time.

In and out: tensors by Hugging Face name. A file's header depends on dtypes and shapes only, so tensors may be
written in any order, with no more than a block in memory. Left out on purpose: pytorch_model.bin.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.serialization import split_state_dict_into_shards_factory

from hydraflow.engine.stored.pieces import ByteRange, Piece, Shape, StoredTensor
from hydraflow.errors import ConfigError
from hydraflow.models.weight_files import SINGLE, files_to_load, raw_header

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of a tensor to be written."""

    dtype: torch.dtype
    shape: Shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_directory(directory: Path, *, field: str) -> dict[str, StoredTensor]:
    """All tensors of a directory. Raises ConfigError when there are none (for the key `field`) or a file is
    broken."""
    there = sorted(directory.glob("*.safetensors"))
    files = [file for file in files_to_load(directory) if file.suffix == ".safetensors"] or there
    if not files:
        raise ConfigError.one(field, str(directory), "there are no safetensors files in it")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors.update({tensor.name: tensor for tensor in read_file(file)})
    return tensors


def read_file(file: Path) -> Iterator[StoredTensor]:
    """The tensors of one file. Raises ConfigError when it is not what its header says."""
    if not file.is_file():
        raise ConfigError.one(str(file), None, "this shard is missing")
    found = raw_header(file)
    if found is None:
        raise ConfigError.one(str(file), None, "is no safetensors file: it has no header")
    (header, start), size = found, file.stat().st_size
    for name, entry in header.items():
        dtype = entry.get("dtype") if isinstance(entry, dict) else None
        if not isinstance(dtype, str) or dtype not in DTYPES:
            rule = f"{name} is of a type that cannot be read: {reprlib.repr(entry)}"
            raise ConfigError.one(str(file), None, rule)
        spec, begin = _spec(file, name, entry)
        begin += start
        if begin + spec.nbytes > size:
            rule = f"is truncated: {size} of at least {begin + spec.nbytes} bytes"
            raise ConfigError.one(str(file), None, rule)
        piece = Piece((0,) * len(spec.shape), spec.shape, ByteRange(file, begin, spec.nbytes))
        yield StoredTensor(name, spec.dtype, spec.shape, (piece,))


def _spec(file: Path, name: str, entry: Mapping[str, Any]) -> tuple[TensorSpec, int]:
    """What a header says of a tensor, and where its numbers start after the header."""
    try:
        spec, (begin, end) = TensorSpec(DTYPES[entry["dtype"]], tuple(entry["shape"])), entry["data_offsets"]
        sizes = (*spec.shape, begin, end)
        if all(type(size) is int and size >= 0 for size in sizes) and end - begin == spec.nbytes:
            return spec, begin
    except (KeyError, TypeError, ValueError):
        pass
    raise ConfigError.one(str(file), None, f"{name} cannot be what the header says: {reprlib.repr(entry)}")


class Writer:
    """Writes a directory's safetensors files. Every announced tensor must be written once, in any order."""

    def __init__(
        self, directory: Path, tensors: Mapping[str, TensorSpec], *, most_bytes: int, single: str = SINGLE
    ):
        self._directory, self._specs, self._single = directory, dict(tensors), single
        self._files: dict[str, Path] = {}
        self._offsets: dict[str, int] = {}
        self._left = set(tensors)
        shards = split_state_dict_into_shards_factory(
            self._specs,
            get_storage_size=lambda spec: spec.nbytes,
            filename_pattern=f"{Path(single).stem}{{suffix}}.safetensors",
            max_shard_size=most_bytes,
        )
        for name, names in shards.filename_to_tensors.items():
            self._begin(directory / name, names)

    def write(self, name: str, blocks: Iterator[torch.Tensor]) -> None:
        """Writes one tensor, given as blocks of its rows in its final dtype."""
        spec = self._specs[name]
        self._left.remove(name)
        at, end = self._offsets[name], self._offsets[name] + spec.nbytes
        descriptor = os.open(self._files[name], os.O_WRONLY)
        try:
            for block in blocks:
                assert block.dtype == spec.dtype, (name, block.dtype, spec.dtype)
                at = _write_all(descriptor, block, at)
            # starts writing to disk early, so that little is left to flush at the end
            os.posix_fadvise(descriptor, self._offsets[name], spec.nbytes, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        assert at == end, f"{name}: {end - at} bytes are left"

    def finish(self) -> None:
        """Writes the index, where there are several files."""
        assert not self._left, f"never written: {sorted(self._left)[:3]}"
        if len(set(self._files.values())) > 1:
            specs = self._specs.values()
            numbers, size = sum(math.prod(spec.shape) for spec in specs), sum(spec.nbytes for spec in specs)
            index = {
                "metadata": {"total_parameters": numbers, "total_size": size},
                "weight_map": {name: self._files[name].name for name in sorted(self._specs)},
            }
            file = self._directory / f"{self._single}.index.json"
            file.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _begin(self, file: Path, names: list[str]) -> None:
        """Writes a file's header. Tensors of wider dtypes come first, so that every tensor is aligned."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in sorted(names, key=lambda name: -self._specs[name].dtype.itemsize):
            spec = self._specs[name]
            described = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape)}
            header[name] = {**described, "data_offsets": [at, at + spec.nbytes]}
            self._files[name], self._offsets[name] = file, at
            at += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # numbers start at a multiple of 8 bytes, so that they can be mapped
        for name in names:
            self._offsets[name] += 8 + len(text)
        with file.open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + at)


def _write_all(descriptor: int, block: torch.Tensor, at: int) -> int:
    """Writes a block at offset `at` of a file; returns the offset of its end."""
    if not block.numel():
        return at
    view = block.contiguous().reshape(-1).view(torch.uint8).numpy().data
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], at + done)
    return at + done
