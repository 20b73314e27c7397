"""Describes a checkpoint on disk, of any format, without reading its numbers.

In: the result of a reader (`megatron.py`; in `model_merger/` `dcp.py` and `verl.py`). Out: a `Checkpoint`.
Left out on purpose: finding it (`model_merger/opening.py`), names in Hugging Face's files
(`model_merger/names.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydraflow.engine.stored.pieces import StoredTensor
from hydraflow.errors import ConfigError, Problem


@dataclass
class Checkpoint:
    """One model's sharded state."""

    directory: Path
    layout: str
    """hydraflow, verl or megatron."""
    world_size: int
    """Ranks that wrote it."""
    tensors: dict[str, StoredTensor]
    """Weights and buffers by the trainer's names."""
    head: str | None = None
    """policy or value; None: not recorded."""
    prefix: str | None = None
    """Prefix of the trainer's names; None: not recorded."""
    lora_alpha: float | None = None
    """lora_alpha of its adapters; None: not recorded."""
    details: dict[str, Any] = field(default_factory=dict)
    """More facts, for the merger's `info` command."""
    others: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Other contents (optimizer and the like): part -> (entries, bytes)."""
    problems: list[Problem] = field(default_factory=list)
    """Parts that are missing or broken."""
    settings: Path | None = None
    """Where configuration and tokenizer are; None: in `huggingface/`."""

    @property
    def huggingface(self) -> Path:
        """Where configuration and tokenizer are."""
        return self.settings or self.directory / "huggingface"

    @property
    def step(self) -> int | None:
        """The training step in the directory's name."""
        for part in reversed(self.directory.absolute().parts):
            if found := re.fullmatch(r"(?:global_step|iter)_(\d+)", part):
                return int(found[1])
        return None

    def require_whole(self) -> None:
        """Raises ConfigError when parts are missing or broken."""
        if self.problems:
            raise ConfigError(self.problems)


def counted(entries: Iterable[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """`Checkpoint.others` from (part, bytes) of each entry."""
    found: dict[str, tuple[int, int]] = {}
    for part, size in entries:
        number, before = found.get(part, (0, 0))
        found[part] = number + 1, before + size
    return found


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is absent. Raises ConfigError for anything else."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError.one(str(file), None, f"is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError.one(str(file), None, "holds no JSON object")
    return content
