"""Finds a checkpoint from the directory that the user names, and opens it with the reader of its format.

In: a directory: one model's (`.../global_step_12/actor`), a step's, or a run's. Out: a `Checkpoint`. Left out
on purpose: the formats (`dcp.py`, `verl.py`, `engine/stored/megatron.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hydraflow.engine.stored import megatron
from hydraflow.engine.stored.checkpoint import Checkpoint
from hydraflow.errors import ConfigError
from hydraflow.model_merger import dcp, verl


def open_checkpoint(path: str | Path, backend: str = "auto", settings: str | None = None) -> Checkpoint:
    """The checkpoint at or below `path`. `settings`: the Hugging Face directory with its configuration and
    tokenizer; None: the checkpoint has them. Raises ConfigError if no checkpoint can be read. Missing or
    broken parts are in its `problems`."""
    found = _read(model_directory(Path(path)), backend)
    if settings is None:
        return found
    folder = Path(settings)
    if not (folder / "config.json").is_file():
        rule = "is not a Hugging Face directory: there is no config.json in it"
        raise ConfigError.one("--hf_model_path", settings, rule)
    return replace(found, settings=folder)


def _read(directory: Path, backend: str) -> Checkpoint:
    if dcp.is_dcp(directory):  # both engines write it
        return dcp.read(directory)
    if backend != "fsdp" and megatron.folder_of(directory) is not None:
        return megatron.read(directory)
    if backend != "megatron" and verl.is_verl(directory):
        return verl.read(directory)
    formats = {"megatron": "Megatron-Core's common.pt nor metadata.json"}
    formats["fsdp"] = "dcp/.metadata nor model_world_size_W_rank_R.pt"
    sought = " nor ".join(text for name, text in formats.items() if backend in (name, "auto"))
    rule = f"holds no sharded checkpoint: neither {sought}"
    raise ConfigError.one(str(directory), None, rule, "--local_dir <run>/global_step_N/actor")


def model_directory(path: Path) -> Path:
    """From a run or a step down to the directory of the policy, or of the only model if that is no
    critic. Raises ConfigError if it is missing or unfinished."""
    path = _step_or_model(path)
    if is_model_directory(path) or not (roles := _roles(path)):
        return path
    for role in roles:
        if role.name == "actor" or (len(roles) == 1 and role.name != "critic"):
            return role
    rule = f"holds no actor, only {', '.join(role.name for role in roles)}"
    raise ConfigError.one("--local_dir", str(path), rule, f"--local_dir {roles[0]} if that is meant")


def model_directories(path: Path) -> list[Path]:
    """All models of a step, or of a run's newest step; for a model's directory, that model alone."""
    path = _step_or_model(path)
    return [path] if is_model_directory(path) else _roles(path) or [path]


def _step_or_model(path: Path) -> Path:
    """The directory of a run's newest step, or of the only step, as in `best`; otherwise `path` itself."""
    path = megatron.latest_directory(path, field="--local_dir")
    steps = list(path.glob("global_step_*"))
    return megatron.latest_directory(steps[0], field="--local_dir") if len(steps) == 1 else path


def _roles(step: Path) -> list[Path]:
    """The models of a step, by name."""
    return [folder for folder in sorted(step.iterdir()) if folder.is_dir() and is_model_directory(folder)]


def is_model_directory(path: Path) -> bool:
    """Whether it is the checkpoint of one model."""
    return dcp.is_dcp(path) or verl.is_verl(path) or megatron.folder_of(path) is not None
