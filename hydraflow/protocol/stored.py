"""Batches on disk: every column bit for bit, row objects as JSON, in one safetensors file. Reading it never
runs code.

In: a DataProto and facts. Out: a file, and both back from it. Left out on purpose: `meta_info`; its relevant
parts belong in the facts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from hydraflow.protocol import wire
from hydraflow.protocol.batch import DataProto
from hydraflow.system.whole_files import replacing


def write_batch(path: Path, batch: DataProto, facts: Mapping[str, Any]) -> None:
    """Writes columns and `facts`. OSError when that fails, ValueError or TypeError for facts that JSON
    cannot hold, SafetensorError for a dtype that its files cannot."""
    arrays: dict[str, np.ndarray] = {}
    columns: dict[str, dict[str, Any]] = {}
    for name, column in batch.items():
        encoded = wire.encode(column, name)
        header = {"kind": encoded.kind, "dtype": encoded.dtype, "shape": list(encoded.shape)}
        columns[name] = {**header, "parts": len(encoded.arrays)}
        arrays |= {f"{name}.{part}": array for part, array in enumerate(encoded.arrays)}
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = safetensors.numpy.save(arrays, {"columns": json.dumps(columns), "facts": json.dumps(dict(facts))})
    with replacing(path) as unfinished:
        unfinished.write_bytes(whole)


def read_batch(path: Path) -> tuple[DataProto, dict[str, Any]]:
    """A file's columns and facts. OSError or safetensors.SafetensorError when it cannot be read."""
    with safetensors.safe_open(path, "numpy") as file:
        columns, facts = (json.loads(file.metadata()[name]) for name in ("columns", "facts"))
        read = {}
        for name, entry in columns.items():
            arrays = tuple(file.get_tensor(f"{name}.{part}") for part in range(entry["parts"]))
            encoded = wire.EncodedColumn(entry["kind"], entry["dtype"], tuple(entry["shape"]), arrays)
            read[name] = wire.decode(encoded)
    return DataProto.from_single_dict(read), facts
