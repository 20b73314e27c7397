"""Provenance of a run: command line, source, versions, machine. One entry per start of the run, in
run.json.

In: this process and its folders. Out: plain values for JSON. Left out on purpose: the configuration and the
plan, which have files of their own, and the environment, which holds secrets.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from hydraflow.engine.config import TRAIN_ENGINES
from hydraflow.generation.config import GENERATION_ENGINES
from hydraflow.system.allocation import allocation

LIBRARIES = (
    "torch",
    "ray",
    "transformers",
    "tensordict",
    "hydra-core",
    "numpy",
    "pyarrow",
    "datasets",
    "safetensors",
    "peft",
)
_OF_ENGINES = [engine.needs for engine in (*GENERATION_ENGINES.values(), *TRAIN_ENGINES.values())]
EXTRAS = (
    *(name for library in _OF_ENGINES if library for name in library.distributions),
    "flash-attn",
    "triton",
    "wandb",
    "mlflow",
    "mlflow-skinny",
    "swanlab",
    "tensorboard",
)
"""Listed only if installed."""
OURS = "hydraflow-trainer"
SLURM_JOB = "slurm_job"
"""Key of the Slurm job that a start belongs to; missing outside of jobs."""
NO_PROGRAMS = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")
"""Options that keep git from starting a monitor or hook that the repository's configuration names."""
GIT_SECONDS = 5.0
"""Timeout for git in seconds: a hanging network drive must not block a run."""


def facts_of_start(step: int, words: Sequence[str]) -> dict[str, Any]:
    """Provenance of this start, after `step` training steps. `words`: the command line without secrets."""
    here, given = Path(__file__).resolve(), allocation()
    source = here.parents[2]
    # an installed hydraflow may be in an environment inside a user's repository
    is_kept = _git(source, "ls-files", "--error-unmatch", str(here)) is not None
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "after_step": step,
        "command": shlex.join(words),
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "platform": platform.platform(),
        "git": commit_of(source) if is_kept else None,
        "git_of_folder": commit_of(Path.cwd()),
        "versions": versions(),
        **({SLURM_JOB: given.job} if given else {}),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that matter, by name."""
    found = {"python": platform.python_version(), **dict.fromkeys((OURS, *LIBRARIES), "not installed")}
    for name in (OURS, *LIBRARIES, *EXTRAS):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit_of(folder: Path) -> dict[str, Any] | None:
    """Commit and state of the repository that `folder` is in; None: not in one, or git is missing."""
    output = _git(folder, "rev-parse", "HEAD", "--show-toplevel")
    if output is None or len(output.splitlines()) != 2:
        return None
    commit, top = output.splitlines()
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {
        "commit": commit,
        "branch": _git(folder, "rev-parse", "--abbrev-ref", "HEAD"),
        "changed_files": None if changed is None else len(changed.splitlines()),
        "folder": top,
    }


def _git(folder: Path, *words: str) -> str | None:
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # git status must not write to the repository
    command = ["git", "-C", str(folder), *NO_PROGRAMS, *words]
    options: dict[str, Any] = {"env": environ, "stdin": subprocess.DEVNULL, "timeout": GIT_SECONDS}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
