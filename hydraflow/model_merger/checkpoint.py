"""What a checkpoint on disk holds, whoever wrote it, and finding it from the directory that the user names.

In: a directory: one model's (`.../global_step_12/actor`), a step's, or a run's. Out: a `Checkpoint` without
its numbers. Left out on purpose: the formats (`dcp.py`, `verl.py`), names in Hugging Face's files
(`names.py`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydraflow.errors import ConfigError, Problem
from hydraflow.model_merger.pieces import StoredTensor

POINTER = "latest_checkpointed_iteration.txt"
UNFINISHED = ".unfinished"


@dataclass
class Checkpoint:
    """One model's sharded state."""

    directory: Path
    layout: str
    """hydraflow or verl."""
    world_size: int
    """Ranks that wrote it."""
    tensors: dict[str, StoredTensor]
    """Weights and buffers by the trainer's names."""
    head: str | None = None
    """policy or value; None: the checkpoint does not say."""
    prefix: str | None = None
    """What the trainer's names have in front; None: the checkpoint does not say."""
    lora_alpha: float | None = None
    """Scale of its adapters times their rank, when it says."""
    details: dict[str, Any] = field(default_factory=dict)
    """More facts, for `info`."""
    others: dict[str, tuple[int, int]] = field(default_factory=dict)
    """What else it holds: optimizer and the like -> (entries, bytes)."""
    problems: list[Problem] = field(default_factory=list)
    """Parts that are missing or broken."""

    @property
    def huggingface(self) -> Path:
        """Where configuration and tokenizer are."""
        return self.directory / "huggingface"

    @property
    def step(self) -> int | None:
        """The training step in the directory's name."""
        for part in reversed(self.directory.absolute().parts):
            if found := re.fullmatch(r"global_step_(\d+)", part):
                return int(found[1])
        return None

    def require_whole(self) -> None:
        """Raises ConfigError when parts are missing or broken."""
        if self.problems:
            raise ConfigError(self.problems)


def open_checkpoint(path: str | Path, backend: str = "auto") -> Checkpoint:
    """The checkpoint at or below `path`. Raises ConfigError when there is none that can be understood.

    Parts that are missing or broken are in its `problems`.
    """
    from hydraflow.model_merger import dcp, verl

    directory = model_directory(Path(path).expanduser())
    if backend == "megatron" or (backend == "auto" and _is_megatron(directory)):
        rule = "Megatron's distributed checkpoints cannot be read yet"
        raise ConfigError.one(
            "--backend" if backend == "megatron" else str(directory), backend, rule, "--backend fsdp"
        )
    if dcp.is_dcp(directory):
        return dcp.read(directory)
    if verl.is_verl(directory):
        return verl.read(directory)
    rule = "holds no sharded checkpoint: neither dcp/.metadata nor model_world_size_W_rank_R.pt"
    raise ConfigError.one(str(directory), None, rule, "--local_dir <run>/global_step_N/actor")


def model_directory(path: Path) -> Path:
    """From a run or a step down to one model's directory. Raises ConfigError for one that is not there or was
    never finished."""
    if not path.is_dir():
        raise ConfigError.one("--local_dir", str(path), "there is no such directory")
    if (path / POINTER).is_file():
        path = _latest_step(path)
    if any(part.endswith(UNFINISHED) for part in path.absolute().parts):
        raise ConfigError.one(
            "--local_dir", str(path), f"a directory named *{UNFINISHED} is a save that was interrupted"
        )
    return path if is_model_directory(path) else next(iter(_roles(path)), path)


def model_directories(path: Path) -> list[Path]:
    """All models of a step or of a run's newest step; a model's directory gives itself."""
    first = model_directory(path)
    return [first] if first.absolute() == path.absolute() else _roles(first.parent)


def _roles(step: Path) -> list[Path]:
    """The models of a step; an actor comes before a critic."""
    return [folder for folder in sorted(step.iterdir()) if folder.is_dir() and is_model_directory(folder)]


def is_model_directory(path: Path) -> bool:
    """Whether a checkpoint of one model is in it."""
    from hydraflow.model_merger import dcp, verl

    return dcp.is_dcp(path) or verl.is_verl(path) or _is_megatron(path)


def read_json(file: Path) -> dict[str, Any]:
    """A file with one JSON object; an absent file is an empty object. Raises ConfigError for anything
    else."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError.one(str(file), None, f"is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError.one(str(file), None, "holds no JSON object")
    return content


def _latest_step(run: Path) -> Path:
    content = (run / POINTER).read_text(encoding="utf-8").strip()
    step = run / f"global_step_{content}"
    if not content.isdigit() or not step.is_dir():
        raise ConfigError.one(
            str(run / POINTER),
            content,
            f"there is no {step.name} beside it",
            "--local_dir <run>/global_step_N/actor",
        )
    return step


def _is_megatron(path: Path) -> bool:
    return any((path / name).is_dir() for name in ("dist_ckpt", "model/dist_ckpt"))
