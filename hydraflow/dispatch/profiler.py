"""Checks that the requested profiler works on this machine, and builds the options of Nsight Systems.

In: `global_profiler`. Out: ConfigError before anything starts, or nothing. Left out on purpose: the profile
itself (`profile.py`).
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from hydraflow.dispatch.config import ProfilerConfig
from hydraflow.dispatch.observability import Observability
from hydraflow.dispatch.profile import NSYS
from hydraflow.errors import ConfigError
from hydraflow.system.whole_files import prove_writable

KEY = "global_profiler"


def require_profiler(config: ProfilerConfig) -> None:
    """Raises ConfigError when the tool is not installed here or its folder is not writable."""
    if config.tool is None:
        return
    if config.tool == NSYS and shutil.which("nsys") is None:
        rule = "the program nsys is not found on PATH; every machine of the run needs NVIDIA Nsight Systems"
        raise ConfigError.one(f"{KEY}.tool", config.tool, rule, f"{KEY}.tool=torch")
    if config.tool == NSYS and Path(shutil.which("python") or "/").parent != Path(sys.executable).parent:
        first = "Ray starts profiled workers with the first `python` on PATH"
        rule = f"{first}, which is not that of {sys.prefix}"
        remedy = f"source {sys.prefix}/bin/activate or {KEY}.tool=torch"
        raise ConfigError.one(f"{KEY}.tool", config.tool, rule, remedy)
    if config.save_path is None:
        return
    try:
        prove_writable(Path(config.save_path).expanduser())
    except OSError as error:
        key, rule = f"{KEY}.save_path", f"the folder cannot be written ({error.strerror})"
        raise ConfigError.one(key, config.save_path, rule, f"{key}=<a folder you may write to>") from error


def nsight_options(
    observability: Observability, name: str, rank: int, device_type: str
) -> dict[str, str] | None:
    """Options of `nsys profile` for a process, as Ray's runtime_env takes them; None: not used.

    On a GPU it records each profiled step and writes a report for each; on a CPU it records the whole run.
    """
    profiler = observability.profiler
    if profiler is None or profiler.tool != NSYS or not profiler.steps:
        return None
    if profiler.ranks is not None and rank not in profiler.ranks:
        return None
    Path(observability.profiles).mkdir(parents=True, exist_ok=True)  # nsys does not create it
    options = {"o": f"{observability.profiles}/{name}-{rank}", "force-overwrite": "true"}
    if device_type == "cpu":
        return options | {"t": "osrt,nvtx"}
    ends = {
        "capture-range": "cudaProfilerApi",
        "capture-range-end": f"repeat-shutdown:{len(set(profiler.steps))}",
        "kill": "none",
    }
    return options | {"t": "cuda,nvtx,cublas,ucx"} | ends
