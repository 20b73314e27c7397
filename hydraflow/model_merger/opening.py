"""Finds a checkpoint from the directory that the user names, and opens it with the reader of its format.

In: a directory: one model's (`.../global_step_12/actor`), a step's, or a run's. Out: a `Checkpoint`. Left out
on purpose: the formats (`dcp.py`, `verl.py`).
"""

from __future__ import annotations

from pathlib import Path

from hydraflow.errors import ConfigError
from hydraflow.model_merger import dcp, verl
from hydraflow.model_merger.checkpoint import Checkpoint

POINTER = "latest_checkpointed_iteration.txt"
UNFINISHED = ".unfinished"


def open_checkpoint(path: str | Path, backend: str = "auto") -> Checkpoint:
    """The checkpoint at or below `path`. Raises ConfigError when there is none that can be understood. Parts
    that are missing or broken are in its `problems`."""
    directory = model_directory(Path(path).expanduser())
    if backend == "megatron" or (backend == "auto" and _is_megatron(directory)):
        field = "--backend" if backend == "megatron" else str(directory)
        rule = "Megatron's distributed checkpoints cannot be read yet"
        raise ConfigError.one(field, backend, rule, "--backend fsdp")
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
        rule = f"a directory named *{UNFINISHED} is a save that was interrupted"
        raise ConfigError.one("--local_dir", str(path), rule)
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
    return dcp.is_dcp(path) or verl.is_verl(path) or _is_megatron(path)


def _latest_step(run: Path) -> Path:
    content = (run / POINTER).read_text(encoding="utf-8").strip()
    step = run / f"global_step_{content}"
    if not content.isdigit() or not step.is_dir():
        rule = f"there is no {step.name} beside it"
        raise ConfigError.one(str(run / POINTER), content, rule, "--local_dir <run>/global_step_N/actor")
    return step


def _is_megatron(path: Path) -> bool:
    return any((path / name).is_dir() for name in ("dist_ckpt", "model/dist_ckpt"))
