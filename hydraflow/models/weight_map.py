"""Which file of a Hugging Face directory holds which weight, according to the index of a sharded model.

In: the index. Out: file names by weight. A name that points outside the directory is refused; the file itself
may be a link, as all are in the hub's cache. Left out on purpose: whether the files exist.
"""

from __future__ import annotations

import json
import reprlib
from pathlib import Path, PurePosixPath

from hydraflow.errors import ConfigError

INDEX, PICKLED_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"


def read_weight_map(index: Path) -> dict[str, str]:
    """File by name of weight. Raises ConfigError for an invalid index, or one that names files elsewhere."""
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
            rule = f"says that {weight} is in {reprlib.repr(file)}, which is no file of this directory"
            raise ConfigError.one(str(index), None, rule)
    return files
